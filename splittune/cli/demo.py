"""splittune demo: a small GPT tuned over virtual GPUs, then trained under the config."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from splittune.cli.console import console, say
from splittune.cli.options import OutOption, QuietOption, VerboseOption
from splittune.cli.tune import tune_and_save
from splittune.config import SplitConfig
from splittune.config.files import check_writable
from splittune.demo import DEMO_DEVICES, DEMO_STEPS, byte_gpt, train_under_config
from splittune.hardware import resolve_hardware
from splittune.options import SearchOptions
from splittune.report.console import describe_memory_kept, show_notes, show_result
from splittune.runners.in_process import InProcessRunner
from splittune.tuner import tune as run_search


def demo(out: OutOption = Path("runs/demo"), quiet: QuietOption = False, verbose: VerboseOption = False) -> None:
    """Tune a small GPT on real text over four virtual GPUs, then train it under the config.

    No GPU needed.
    """
    check_writable(out)
    # The demo's operations are small: threads cost more than they bring.
    torch.set_num_threads(1)
    task = byte_gpt()
    hardware = resolve_hardware(DEMO_DEVICES)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    say(f"A byte-level GPT of {num_parameters:,} parameters learns the source of Python's own standard library,")
    say("on 4 virtual GPUs: its training is real, on this CPU. Another program holds most of GPU 0.\n")
    result = tune_and_save(
        partial(run_search, InProcessRunner(task, hardware), SearchOptions()),
        out,
        quiet=quiet,
        verbose=verbose,
        # What is inferred of a job is for its user to check, and this one is nobody's.
        log_level=logging.INFO if verbose else logging.WARNING,
    )
    show_result(result, console, verbose=verbose)
    config = SplitConfig.load(out / "split.json")
    with console.status(f"training {DEMO_STEPS} steps under the tuned split"):
        losses, peaks = train_under_config(config, hardware)
    say(
        f"\nTrained {len(losses)} steps of {config.split.global_batch_size} samples under it: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}, {describe_memory_kept(config, peaks)}."
    )
    say(f"Saved in {out}: split.json, trials.csv, devices.csv, explanation.txt")
    say("For your own model: splittune tune FILE.py:FUNCTION")
    show_notes(result, console)
