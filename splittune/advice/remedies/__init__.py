"""What may help beside the split: a file for each family of remedies, those that are tried before the rules."""

from splittune.advice.remedies.cards import CLOSED_PROGRAMS, FEWER_CARDS, OTHER_GPU0
from splittune.advice.remedies.loss import LOSS_IN_REPLICAS
from splittune.advice.remedies.precision import BFLOAT16
from splittune.advice.remedies.ranks import DDP
from splittune.advice.remedies.rules import CHECKPOINTING, EVALUATION, IN_PLACE, LOADER, OPTIMIZER
from splittune.advice.remedies.steps import MORE_STEPS

# In the order in which they are looked at: what gains most comes first, as trials may not reach all.
REMEDIES = (
    LOSS_IN_REPLICAS,
    BFLOAT16,
    OTHER_GPU0,
    CLOSED_PROGRAMS,
    DDP,
    MORE_STEPS,
    FEWER_CARDS,
    CHECKPOINTING,
    IN_PLACE,
    OPTIMIZER,
    LOADER,
    EVALUATION,
)

__all__ = ["REMEDIES"]
