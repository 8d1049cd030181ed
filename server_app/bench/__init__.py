"""Suites: many runs from one file, and their table."""
