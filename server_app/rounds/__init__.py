"""The round loop: one run, the aggregation of a round, the checks of every reply."""
