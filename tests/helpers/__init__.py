"""What several test files use; no test file imports another."""
