"""A simulation of our own start: a private SuperLink and the processes below it."""
