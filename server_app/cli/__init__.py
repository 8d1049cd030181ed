"""The fcil command: one file for each of its commands."""
