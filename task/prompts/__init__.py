"""Prompts of a frozen Vision Transformer, one kind a file."""
