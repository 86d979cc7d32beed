"""Other tools, run as they are, beside the guided search on real workloads: `python -m benchmarks.peers`."""
