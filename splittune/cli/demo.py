"""splittune demo: GPT-2 planned on cards that are not here, then a small GPT tuned and really trained."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from splittune.cli.console import console, say, working
from splittune.cli.options import OutOption, QuietOption, VerboseOption
from splittune.cli.tune import tune_and_save
from splittune.config import SplitConfig
from splittune.config.files import check_writable
from splittune.demo import (
    DEMO_DEVICES,
    DEMO_STEPS,
    GPT2_DEVICES,
    GPT2_MAX_TRIALS,
    byte_gpt,
    gpt2,
    halved_until_it_fits,
    train_under_config,
)
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.options import SearchOptions
from splittune.profiling.measurement import Measurement
from splittune.report import TuneResult
from splittune.report.console import describe_memory_kept, show_notes, show_result
from splittune.report.words import rate_of, shape_of
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeRunner
from splittune.training import TrainingTask
from splittune.tuner import tune as run_search


def demo(out: OutOption = Path("runs/demo"), quiet: QuietOption = False, verbose: VerboseOption = False) -> None:
    """Plan GPT-2 on four virtual GPUs, then tune a small GPT on real text and train it under the config.

    No GPU needed.
    """
    check_writable(out)
    # The demo's operations are small: threads cost more than they bring.
    torch.set_num_threads(1)
    _plan_gpt2(out / "gpt2", quiet=quiet, verbose=verbose)
    _train_byte_gpt(out, quiet=quiet, verbose=verbose)
    say(f"Saved in {out}: report.html (open it in a browser), split.json, the trials; those of GPT-2 in gpt2/")
    say("For your own model: splittune tune FILE.py:FUNCTION")


def _plan_gpt2(out: Path, *, quiet: bool, verbose: bool) -> None:
    say("Planned on this CPU: GPT-2 (124 million parameters, 1,024 tokens, bfloat16), 64 samples a step,")
    say("on four RTX 3090, none of which is here. Another program holds 20 of GPU 0's 24 GiB.\n")
    with working("making the model", is_shown=not quiet):
        runner = _on_shapes(gpt2(), GPT2_DEVICES)
    options = SearchOptions(max_trials=GPT2_MAX_TRIALS)
    result = tune_and_save(
        partial(run_search, runner, options), out, quiet=quiet, verbose=verbose, log_level=_log_level(verbose)
    )
    headroom = result.config.min_headroom_bytes
    with working("halving the batch, as people do, until an even split fits", is_shown=not quiet):
        runner.open(["output"])
        try:
            measure = runner.profiler(min_headroom_bytes=headroom, loss_placement="output").measure
            halved = halved_until_it_fits(measure, result.config.split.global_batch_size)
        finally:
            runner.close()
    say("")
    for line in _beside_halving(result, halved):
        say(line)
    show_result(result, console, verbose=verbose)


def _beside_halving(result: TuneResult, halved: Measurement | None) -> list[str]:
    """What people do today, and what is to be had instead."""
    best = result.best
    batch_size = best.split.global_batch_size
    kept = f"splittune keeps {batch_size} samples a step, {shape_of(best.split)}: {rate_of(best)} samples/s"
    if halved is None or halved.throughput is None or best.throughput is None:
        return [f"No even split fits, however small the batch. {kept} (modelled)."]
    left = f"{halved.split.global_batch_size} a step, {shape_of(halved.split)}: {rate_of(halved)} samples/s"
    return [
        f"Halving the batch, as people do: {left}.",
        f"{kept}, {best.throughput / halved.throughput:.1f} times as many (modelled).",
    ]


def _train_byte_gpt(out: Path, *, quiet: bool, verbose: bool) -> None:
    task = byte_gpt()
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    say(f"\nReally trained, on this CPU: a byte-level GPT of {num_parameters:,} parameters learns the source of")
    say("Python's own standard library, on 4 small virtual GPUs, the first of them almost full.")
    options = SearchOptions()
    with working("tuning its split", is_shown=not quiet):
        search = partial(run_search, _on_shapes(task, DEMO_DEVICES), options)
        result = tune_and_save(search, out, quiet=True, verbose=verbose, log_level=_log_level(verbose))
    config = SplitConfig.load(out / "split.json")
    with working(f"training {DEMO_STEPS} steps under the tuned split", is_shown=not quiet):
        losses, peaks = train_under_config(config, resolve_hardware(DEMO_DEVICES))
    even = result.baseline
    instead = "" if even is None else f", {rate_of(even)} as the even split's {shape_of(even.split)}"
    say(f"Tuned: {shape_of(config.split)}, {rate_of(result.best)} samples/s{instead} (modelled).")
    say(
        f"Trained {len(losses)} steps of {config.split.global_batch_size} samples under it: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}, {describe_memory_kept(config, peaks)}."
    )
    show_notes(result, console)


def _on_shapes(task: TrainingTask, devices: str) -> ShapeRunner:
    hardware = resolve_hardware(devices)
    assert isinstance(hardware, VirtualHardware)
    return ShapeRunner(task, hardware, Scripts())


def _log_level(verbose: bool) -> int:
    """What is inferred of a job is for its user to check, and these are nobody's."""
    return logging.INFO if verbose else logging.WARNING
