"""Trials: what is measured of a split, and how."""
