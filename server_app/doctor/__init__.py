"""Checks of this machine and a dry run, for fcil doctor."""
