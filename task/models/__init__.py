"""The model: frozen backbone, prompt and head, and what prepares, feeds and evaluates it."""
