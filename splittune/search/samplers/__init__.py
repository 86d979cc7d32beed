"""The samplers a study may use: guided by models, and Optuna's own with what is known not to fit filtered out."""
