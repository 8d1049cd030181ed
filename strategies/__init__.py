"""The server half of every method: aggregation and refinement of the global model.

Shapes: P prototypes (one per client and class that reported it), K classes, D numbers of a feature, [B, D] a batch.
"""
