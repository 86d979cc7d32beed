"""The splits worth judging, and what the models make of each."""
