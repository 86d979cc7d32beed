"""Models of memory and of step time, fitted to the trials so far."""
