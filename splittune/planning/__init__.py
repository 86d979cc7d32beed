"""What machines and batch sizes would give, on virtual cards: no GPU needed."""

from splittune.planning.plan import plan
from splittune.planning.result import Plan, PlannedSearch

__all__ = ["Plan", "PlannedSearch", "plan"]
