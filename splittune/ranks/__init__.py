"""Beyond one process: what every rank of a process group does."""

from splittune.ranks.share import RankShare

__all__ = ["RankShare"]
