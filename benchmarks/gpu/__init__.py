"""Everything that a single CUDA card can show: `python -m benchmarks.gpu`."""
