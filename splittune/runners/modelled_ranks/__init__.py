"""Trials under DistributedDataParallel on cards that are not here, put together from trials on one card.

Ranks do not meet before the all-reduce in their step's last backward, and each is a process with a thread of its own to
launch from. So what a rank holds, and what it takes until then, follows from its kind of card and its share alone:

    kinds.py        cards that are alike, however many there are
    one_card.py     what one of them does with a share: the job's own step, on shapes
    step.py         the step of all ranks: the slowest, what is left over of the all-reduce, the update

How gradients are added up stands in `hardware/virtual/ring.py`, which shares are tried in `search/by_kind/`.

A thousand cards of four kinds cost as much as four.
"""
