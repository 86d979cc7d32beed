"""splittune verify: some steps under a config, beside its plan."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from splittune.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_NOT_VERIFIED,
    console,
    log_above_the_bar,
    say,
    sigterm_as_exit,
    working,
)
from splittune.cli.options import JobArgument, QuietOption
from splittune.cli.ranks import as_rank, check_strategy, launch_this, leave_with
from splittune.cli.tune import names_cuda_devices
from splittune.config import SplitConfig
from splittune.config.files import check_writable
from splittune.errors import ConfigError
from splittune.report.progress import SilentCallback, StepCallback
from splittune.runners.launch.place import Place, place_of
from splittune.runners.launch.rank import ARRIVAL_S
from splittune.runners.ranks.control import DEFAULT_WAIT_S
from splittune.training.load_task import load_task
from splittune.verify import DEFAULT_NUM_STEPS
from splittune.verify import verify as run_steps
from splittune.verify.console import show_verification
from splittune.verify.on_ranks import verify_on_ranks

SplitArgument = Annotated[Path, typer.Argument(metavar="SPLIT.json", help="The config that tune wrote.")]
DevicesOption = Annotated[
    str | None, typer.Option(help='"cuda:1,cuda:0", or virtual GPUs. Default: those it was tuned on.')
]
StepsOption = Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")]
EvalBatchOption = Annotated[
    bool, typer.Option("--eval-batch-size", help="Measure the largest evaluation batch, and keep it in SPLIT.json.")
]


def verify(
    split: SplitArgument,
    job: JobArgument,
    devices: DevicesOption = None,
    steps: StepsOption = DEFAULT_NUM_STEPS,
    eval_batch_size: EvalBatchOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train your own job under the config for some steps, and compare its memory with the plan."""
    config = SplitConfig.load(split)
    if eval_batch_size:
        check_writable(split.parent)
    place = place_of()
    if place is not None or config.strategy == "ddp":
        if place is not None:
            check_strategy(place, config.strategy)
        if eval_batch_size:
            shares = "+".join(map(str, config.split.shard_sizes))
            raise ConfigError(
                '--eval-batch-size was given with a config for ranks, strategy="ddp": expected none, for it is a batch '
                "that one process shares out among its cards, and a rank evaluates batches of its own on one. Leave it "
                f"out, and evaluate up to {shares} samples at once, rank by rank: verify runs those."
            )
        if place is None:
            launch_this(config.split.num_devices, max_restarts=0)
        _verify_as_rank(place, config, job, devices, steps, quiet=quiet)
        return
    log_above_the_bar(logging.WARNING if quiet else logging.INFO)
    callback = SilentCallback() if quiet else StepCallback(console)
    try:
        with sigterm_as_exit():
            with working(f"making the job of {job}", is_shown=not quiet):
                task = load_task(job)
            result = run_steps(
                config,
                task,
                devices=devices,
                num_steps=steps,
                measure_eval_batch_size=eval_batch_size,
                callback=callback,
            )
    except KeyboardInterrupt:
        say("Interrupted; the model is as it was.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        callback.on_end()
    show_verification(result, console)
    if eval_batch_size and result.config.eval_batch_size is not None:
        result.config.save(split)
        say(f"Written to {split}: eval_batch_size {result.config.eval_batch_size}.")
    say(f"\n{result.summary}")
    if not result.is_verified:
        raise typer.Exit(EXIT_NOT_VERIFIED)


def _verify_as_rank(
    place: Place, config: SplitConfig, job: str, devices: str | None, steps: int, *, quiet: bool
) -> None:
    """Train together with the other ranks; rank 0 shows how it went, and its exit code is everybody's."""
    is_shown = place.is_first and not quiet
    log_above_the_bar(logging.INFO if is_shown else logging.WARNING)
    callback = StepCallback(console) if is_shown else SilentCallback()
    named = devices or ",".join(device.torch_device for device in config.devices)
    on_cards = config.virtual_spec is None and names_cuda_devices(named)
    with as_rank(place, on_cards=on_cards, trial_timeout_s=DEFAULT_WAIT_S, quiet=quiet):
        try:
            result = verify_on_ranks(
                config,
                partial(load_task, job),
                devices=devices,
                num_steps=steps,
                callback=callback,
                arrival_timeout_s=ARRIVAL_S,
            )
        finally:
            callback.on_end()
        if place.is_first:
            show_verification(result, console)
            say(f"\n{result.summary}")
    if not result.is_verified:
        leave_with(place, EXIT_NOT_VERIFIED)
