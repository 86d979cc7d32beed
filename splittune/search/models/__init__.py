"""Models of memory and of step time, fitted to the trials so far."""

# Above this relative error a model did not fit, and people are told so. A choice: the gains that
# the search is after are smaller than this. Larger, and a poor model goes unnoticed.
POOR_FIT = 0.05
