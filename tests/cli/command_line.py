"""A job in a file of the user's own, and how a command ended."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

JOB = '''
"""A small job, in a file of the user's own."""
import os, pathlib, signal, time
import torch
from torch import nn
from splittune import TrainingTask

BATCHES = [(torch.randn(8, 4), torch.randn(8, 1))] * 2

class Model(nn.Linear):
    num_calls = 0
    fails_at, error = None, None

    def forward(self, x):
        Model.num_calls += 1
        if Model.num_calls == self.fails_at:
            raise self.error
        return super().forward(x)

def make_task():
    return TrainingTask(Model(4, 1), BATCHES)

def interrupted():
    task = make_task()
    task.model.fails_at, task.model.error = 12, KeyboardInterrupt()
    return task

def buggy():
    task = make_task()
    task.model.fails_at, task.model.error = 12, ZeroDivisionError("a bug of the user's own")
    return task

def slow():
    class Slow(Model):
        def forward(self, x):
            if Model.num_calls == 12:
                pathlib.Path("reached").touch()
                time.sleep(60)
            return super().forward(x)
    return TrainingTask(Slow(4, 1), BATCHES)

def terminated():
    class Terminated(Model):
        def forward(self, x):
            if Model.num_calls == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)
    return TrainingTask(Terminated(4, 1), BATCHES)

def batches_of_6():
    return TrainingTask(Model(4, 1), [(x[:6], y[:6]) for x, y in BATCHES])

def too_large():
    return TrainingTask(nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 1024), nn.Linear(1024, 1)), BATCHES)

def nothing_to_train():
    return TrainingTask(nn.ReLU(), BATCHES)

def raises():
    raise ZeroDivisionError("a bug of the user's own")

def exits():
    raise SystemExit(0)

def aborts():
    os.abort()

def needs_an_argument(path):
    return make_task()

def returns_a_model():
    return Model(4, 1)

def returns_nothing():
    pass

NOT_A_FUNCTION = 3
'''
CARDS = ("--devices", "2xRTX3090")
Run = Callable[..., "Ended"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The message on standard error, without a traceback before it."""
        return self.err.rpartition("splittune: ")[2]


def trials_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
