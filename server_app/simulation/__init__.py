"""Flower's simulation, started by fcil run: a private SuperLink and its processes."""
