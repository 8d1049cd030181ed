"""The fcil command: one file for each subcommand."""
