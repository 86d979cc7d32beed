"""splittune verify: some steps under a config, beside its plan."""

from __future__ import annotations

import logging
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
)
from splittune.cli.options import JobArgument, QuietOption
from splittune.config import SplitConfig
from splittune.config.files import check_writable
from splittune.report.progress import SilentCallback, StepCallback
from splittune.training.load_task import load_task
from splittune.verify import DEFAULT_NUM_STEPS
from splittune.verify import verify as run_steps
from splittune.verify.console import show_verification

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
    log_above_the_bar(logging.WARNING if quiet else logging.INFO)
    callback = SilentCallback() if quiet else StepCallback(console)
    try:
        with sigterm_as_exit():
            result = run_steps(
                config,
                load_task(job),
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
