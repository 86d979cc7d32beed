"""How well virtual cards foretell training steps that were measured on a real one: `python -m benchmarks.truth`."""
