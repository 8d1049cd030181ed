"""Run keys: what each may be, how they are read, which combinations make sense."""
