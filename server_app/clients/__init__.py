"""The clients of a run: the hello round, the registry, sampling, class names."""
