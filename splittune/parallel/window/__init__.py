"""Accumulation windows: once a step parameters go out and gradients come home."""
