"""Trials in the ranks of a process group: each probes its own card, then all agree on what came of it.

Nothing that may run out of memory runs between a collective's begin and end, so no rank waits for one that has failed:

    control.py      the group of their own over which ranks agree, and what is lost when one of them is
    orders.py       what rank 0 has the ranks do, and what each answers: plain data
    crew.py         rank 0 gives orders and takes part, the others follow
    own_card.py     a rank's real card: its share by itself, its part of synchronised steps (step.py)
    runner.py       RanksRunner: a search over real cards
    virtual.py      each rank's virtual card, and a search by kinds over all of them
    journal.py      the trial that is on its way, in a file: what a restart knows of the one that ended it
    memo.py         what was measured, in a file: a search that was stopped goes on
"""
