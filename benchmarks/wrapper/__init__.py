"""The wrapper's two engines on the same work; `.cuda` puts them beside nn.DataParallel on real cards."""
