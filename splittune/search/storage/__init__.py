"""How trials are kept: the study, its journal, its lock, its records."""
