"""What may help beside the split: a file for each family of remedies, the likeliest first."""

from splittune.advice.remedies.cards import CLOSED_PROGRAMS, FEWER_CARDS, OTHER_GPU0
from splittune.advice.remedies.loss import LOSS_IN_REPLICAS

REMEDIES = (LOSS_IN_REPLICAS, OTHER_GPU0, CLOSED_PROGRAMS, FEWER_CARDS)

__all__ = ["REMEDIES"]
