"""The wrapper's two engines on the same work: `python -m benchmarks.wrapper`, and `.cuda` beside nn.DataParallel on real cards."""
