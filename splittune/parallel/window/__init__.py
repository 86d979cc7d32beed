"""Accumulation windows: parameters travel once a step, and gradients are summed once, however many micro-batches it has."""
