"""The files of a run: where they lie, how they are written, checkpoints and resume."""
