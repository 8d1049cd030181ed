"""Local objectives: the loss of a local step, one method a file."""
