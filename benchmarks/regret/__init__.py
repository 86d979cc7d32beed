"""How close each way of searching comes to the best split: `python -m benchmarks.regret`."""
