"""Local objectives: the loss of a local step, one method a file.

Shapes: [B, D] are the features of a batch of B images; [seen] counts all head rows; P prototypes came from the server.
"""
