"""Real training jobs to tune and to test with; not part of the installed package."""
