"""NCCL between the cards of one process, where torch has it and a first try gives the right sums."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from splittune.errors import DeviceError

# Two threads' calls must reach every card in one order, or each waits on one card for what the other holds up on the
# next. torch takes no lock of its own.
_ONE_AT_A_TIME = threading.Lock()
KIND = "cuda"  # and ROCm's cards, whose NCCL goes by the same names
# Its first use takes some seconds, most of them before anything is queued. A choice: a card that is still busy with
# something of the caller's is waited for as well.
FIRST_TRY_LIMIT_S = 120.0
POLL_S = 0.001
_ADDABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Nccl(Protocol):
    """A broadcast and a sum over distinct cards, as nn.DataParallel's; the first card is the root."""

    def broadcast(self, flats: Sequence[Tensor]) -> None:
        """Copy the first card's flat tensor into the others', one a card, of any dtype."""
        ...

    def can_add(self, dtype: torch.dtype) -> bool:
        """Whether it adds tensors of that dtype."""
        ...

    def add_up(self, flats: Sequence[Tensor]) -> None:
        """Leave the sum of the flat tensors, one a card, in the first card's."""
        ...


class TorchNccl:
    """torch's own.

    Args:
        streams: for each card the stream that it runs on, which the tensors belong to.
    """

    def __init__(self, streams: Mapping[torch.device, Any]) -> None:
        self._streams = list(streams.values())

    def broadcast(self, flats: Sequence[Tensor]) -> None:
        parts = [flat.view(torch.uint8) for flat in flats]
        with _ONE_AT_A_TIME:
            torch.cuda.nccl.broadcast(parts, streams=self._streams)

    def can_add(self, dtype: torch.dtype) -> bool:
        return dtype in _ADDABLE

    def add_up(self, flats: Sequence[Tensor]) -> None:
        with _ONE_AT_A_TIME:
            torch.cuda.nccl.reduce(flats, output=flats[0], streams=self._streams)


@cache
def is_nccl_usable(cards: tuple[torch.device, ...]) -> bool:
    """Whether NCCL serves these cards: two or more of CUDA's kind, each once, and a broadcast and a sum come out right.

    Where they do not, that is said once, in a warning; tensors then go from card to card by ordinary copies.
    """
    if len(cards) < 2 or len(set(cards)) < len(cards) or any(card.type != KIND for card in cards):
        return False
    try:
        _try_out(cards)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError) as error:  # AttributeError: a torch that was built without it
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"NCCL cannot be used between {', '.join(map(str, cards))}: {reason} Parameters and gradients go from card "
            "to card by ordinary copies, which are exact and may be slower. NCCL_DEBUG=INFO says more.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _try_out(cards: Sequence[torch.device]) -> None:
    """A broadcast and a sum of one number a card.

    Raises:
        RuntimeError: NCCL cannot be initialised, or gives something else than 1 + 1 + ... = n.
        DeviceError: it does not come to an end; the cards are at it for good, and nothing else would get through.
    """
    module = torch.get_device_module(cards[0])
    streams = {card: module.current_stream(card) for card in cards}
    flats = [torch.full((1,), float(index == 0), device=card) for index, card in enumerate(cards)]
    with torch.no_grad():
        nccl = TorchNccl(streams)
        nccl.broadcast(flats)
        nccl.add_up(flats)
    done, deadline_s = streams[cards[0]].record_event(), time.monotonic() + FIRST_TRY_LIMIT_S
    while not done.query():
        if time.monotonic() > deadline_s:
            raise DeviceError(
                f"NCCL did not add up one number from each of {', '.join(map(str, cards))} within "
                f"{FIRST_TRY_LIMIT_S:g} s: expected milliseconds. Often the machine's IOMMU keeps cards from reading "
                "one another's memory: set NCCL_P2P_DISABLE=1 in the environment and start again. NCCL_DEBUG=INFO says "
                "more."
            )
        time.sleep(POLL_S)
    total = flats[0].item()
    if total != len(cards):
        raise RuntimeError(f"its sum of a one from each of {len(cards)} cards is {total:g}.")
