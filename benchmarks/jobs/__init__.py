"""Jobs that benchmarks train: for virtual GPUs, and for real cards."""
