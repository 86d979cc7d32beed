"""The samplers a study may use: guided by models, or Optuna's own kept to what may fit."""
