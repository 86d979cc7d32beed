"""A command on ranks: started by torch's launcher, joined by its processes, started again where one of them ends.

place.py      what the environment says: whether this process is a rank, of whose launch
agent.py      the launcher's side: one process a card, and again after a surprise
start.py      one store for each start of the ranks, on however many machines
rank.py       a rank's side: it joins the group, ends with its launcher, and leaves it in order
outcome.py    how a command ended, once all ranks have found it alike
attempts.py   what the launcher keeps between two starts: who ended, and whether any trial was finished
"""
