"""The command line: demo, tune, verify, devices."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from splittune.config import SplitConfig
from splittune.config.files import check_writable
from splittune.demo import DEMO_DEVICES, byte_gpt, train_under_config
from splittune.errors import NoFeasibleSplitError, NvmlUnavailableError, SplittuneError, WorkerError
from splittune.hardware import resolve_hardware
from splittune.hardware.cuda import count_visible_devices
from splittune.hardware.cuda.nvml import Nvml
from splittune.hardware.cuda.nvml_calls import NvmlDevice, NvmlInstance
from splittune.hardware.virtual.catalog import GPUS
from splittune.options import DEFAULT_MAX_TRIALS, LossPlacements, SearchOptions, SharesChoice
from splittune.report import TuneResult, save_tables
from splittune.report.console import show_memory_plan, show_result
from splittune.report.progress import ConsoleCallback, SilentCallback, StepCallback
from splittune.runners.base import DeviceView, Runner
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker.runner import DEFAULT_TRIAL_TIMEOUT_S, WorkerRunner
from splittune.search import DEFAULT_SAMPLER, SAMPLER_NAMES, Trial
from splittune.split import SplitSpace
from splittune.training.load_task import load_task
from splittune.tuner import tune
from splittune.units import GIB, format_bytes
from splittune.verify import DEFAULT_NUM_STEPS, verify
from splittune.verify.console import show_verification

EXIT_NO_FEASIBLE_SPLIT = EXIT_NOT_VERIFIED = 1
EXIT_BAD_USAGE, EXIT_JOB_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 3, 130, 143

app = typer.Typer(
    help="Finds the batch split that trains fastest without running out of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Isolation = Literal["auto", "process", "none"]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for split.json, the tables and the explanation.")]
MaxTrialsOption = Annotated[int, typer.Option(min=1, help="Splits to search at most.")]
SeedOption = Annotated[int, typer.Option(min=0, help="For whatever is drawn at random.")]
JobArgument = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="FUNCTION() returns a TrainingTask.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def main() -> None:
    """Run the command line.

    Exit 0: done; 1: no feasible split, or not verified; 2: bad usage; 3: the job raised; 130 and 143: interrupted.
    """
    try:
        app()
    except NoFeasibleSplitError as error:
        _fail(error, EXIT_NO_FEASIBLE_SPLIT)
    except WorkerError as error:
        _fail(error, EXIT_JOB_FAILED)
    except SplittuneError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, SplittuneError | OSError):
            traceback.print_exception(error.__cause__)
        _fail(error, EXIT_BAD_USAGE)
    except Exception:  # noqa: BLE001  the user's own, shown as Python would, but not with the code of "no feasible split"
        traceback.print_exc()
        sys.exit(EXIT_JOB_FAILED)


@app.command("tune")
def tune_command(
    job: JobArgument,
    devices: Annotated[
        str | None,
        typer.Option(help='"cuda:1,cuda:0", or virtual GPUs: "4xV100-16GB". Default: all visible CUDA devices.'),
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples behind one optimizer step. Default: the loader's batch size.")
    ] = None,
    out: OutOption = Path("runs/split"),
    max_trials: MaxTrialsOption = DEFAULT_MAX_TRIALS,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds after which no further split is searched.")] = None,
    min_headroom_bytes: Annotated[
        int | None, typer.Option(min=0, help="Bytes that every card must keep free. Default: 5 % of what others leave.")
    ] = None,
    storage: Annotated[str | None, typer.Option(help="File that keeps the trials: the search can go on later.")] = None,
    loss_placement: Annotated[
        LossPlacements, typer.Option(help='Compute the loss in each "replica" instead of from gathered outputs.')
    ] = "output",
    shares: Annotated[
        SharesChoice,
        typer.Option(
            help='"gpu0": GPU 0\'s share, the rest even; "each": every card its own; "auto": by how alike they are.'
        ),
    ] = "auto",
    sampler: Annotated[str, typer.Option(help=f"One of {', '.join(SAMPLER_NAMES)}.")] = DEFAULT_SAMPLER,
    isolation: Annotated[
        Isolation,
        typer.Option(
            help='"process": trials run in a process of their own, which may crash or hang without ending the search; '
            '"none": in this one; "auto": the first on CUDA devices, the second on virtual ones.'
        ),
    ] = "auto",
    trial_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a trial in a process of its own counts as hung.")
    ] = DEFAULT_TRIAL_TIMEOUT_S,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest split for your own job, and write the config to train with."""
    check_writable(out)
    runner: Runner
    if isolation == "process" or (isolation == "auto" and _names_cuda_devices(devices)):
        runner = WorkerRunner(job, devices, global_batch_size=global_batch_size, trial_timeout_s=trial_timeout_s)
    else:
        hardware = resolve_hardware(devices)
        task = load_task(job)
        if global_batch_size is not None:
            task = dataclasses.replace(task, global_batch_size=global_batch_size)
        runner = InProcessRunner(task, hardware)
    options = SearchOptions(
        min_headroom_bytes=min_headroom_bytes,
        max_trials=max_trials,
        timeout_s=timeout_s,
        storage=storage,
        loss_placement=loss_placement,
        shares=shares,
        sampler=sampler,
        seed=seed,
    )
    result = _tune_and_save(runner, out, options, quiet=quiet)
    show_result(result, console)
    console.print(
        f"\nWritten to {out}: split.json, trials.csv, devices.csv, explanation.txt. To train:", highlight=False
    )
    console.print(
        f'    config = splittune.SplitConfig.load("{out / "split.json"}")\n    model = config.wrap(model)',
        highlight=False,
        markup=False,
    )


@app.command("verify")
def verify_command(
    split: Annotated[Path, typer.Argument(metavar="SPLIT.json", help="The config that tune wrote.")],
    job: JobArgument,
    devices: Annotated[
        str | None, typer.Option(help='"cuda:1,cuda:0", or virtual GPUs. Default: those it was tuned on.')
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = DEFAULT_NUM_STEPS,
    eval_batch_size: Annotated[
        bool, typer.Option("--eval-batch-size", help="Measure the largest evaluation batch, and keep it in SPLIT.json.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Train your own job under the config for some steps, and compare its memory with the plan."""
    config = SplitConfig.load(split)
    if eval_batch_size:
        check_writable(split.parent)
    _log_above_the_bar(quiet=quiet)
    callback = SilentCallback() if quiet else StepCallback(console)
    try:
        with _sigterm_as_exit():
            result = verify(
                config,
                load_task(job),
                devices=devices,
                num_steps=steps,
                measure_eval_batch_size=eval_batch_size,
                callback=callback,
            )
    except KeyboardInterrupt:
        console.print("Interrupted; the model is as it was.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        callback.on_end()
    show_verification(result, console)
    if eval_batch_size and result.config.eval_batch_size is not None:
        result.config.save(split)
        console.print(f"Written to {split}: eval_batch_size {result.config.eval_batch_size}.", highlight=False)
    console.print(f"\n{result.summary}", highlight=False, markup=False)
    if not result.is_verified:
        raise typer.Exit(EXIT_NOT_VERIFIED)


@app.command()
def demo(out: OutOption = Path("runs/demo"), quiet: QuietOption = False) -> None:
    """Tune a small GPT on real text over four virtual GPUs, then train it under the config. No GPU needed."""
    check_writable(out)
    torch.set_num_threads(1)  # the demo's operations are small: threads would cost more than they bring
    task = byte_gpt()
    hardware = resolve_hardware(DEMO_DEVICES)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    console.print(
        f"A byte-level GPT of {num_parameters:,} parameters, on the source of Python's standard library, over four "
        "virtual GPUs.\nThe tensors, gradients and training are real, on this CPU; memory is accounted and time is "
        "modelled.\nAnother program holds most of GPU 0, as a notebook left open does.\n",
        highlight=False,
    )
    runner = InProcessRunner(task, hardware)
    result = _tune_and_save(runner, out, SearchOptions(), quiet=quiet)
    show_result(result, console)
    console.print(f"\nWritten to {out}: split.json, trials.csv, devices.csv, explanation.txt.\n", highlight=False)
    config = SplitConfig.load(out / "split.json")
    losses, peaks = train_under_config(config, hardware, on_step=None if quiet else _show_step)
    show_memory_plan(config, peaks, console)
    console.print(
        f"\nThe loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps of exactly "
        f"{config.split.global_batch_size} samples. For your own model: splittune tune FILE.py:FUNCTION",
        highlight=False,
    )


@app.command()
def devices() -> None:
    """List this machine's GPUs and their MIG instances as NVML sees them, and the virtual ones that can be planned with."""
    try:
        with Nvml() as nvml:
            found = nvml.list_devices()
    except NvmlUnavailableError as error:
        console.print(f"No real GPU can be listed: {error}", highlight=False)
        found = ()
    if found:
        table = Table("GPU", "UUID", "memory", "used", "held by", title="This machine (used: by all programs)")
        for card in found:
            listed: list[NvmlDevice | NvmlInstance] = [card, *(card.instances or ())]
            for device in listed:
                name = ("" if device is card else "  ") + (device.name or "unknown")
                held_by, memory = "\n".join(map(str, device.processes or ())), device.memory
                total, used = (
                    ("unknown",) * 2 if memory is None else map(format_bytes, (memory.total_bytes, memory.used_bytes))
                )
                table.add_row(name, device.uuid or "unknown", total, used, held_by or "nobody known")
            if card.instances is None:
                table.add_row("  MIG instances", *("unknown",) * 4)
        console.print(table)
    table = Table(
        Column("name", no_wrap=True), "GiB", "GB/s", "float32 TFLOPS", "half TFLOPS",
        title='Virtual GPUs: devices="4xRTX3090", or "1xRTX3090:occupied=8GiB,3xRTX3090"',
    )  # fmt: skip
    for gpu in GPUS:
        table.add_row(
            gpu.name,
            f"{gpu.total_bytes / GIB:g}",
            f"{gpu.memory_bandwidth_bytes_per_s / 1e9:g}",
            f"{gpu.fp32_flops_per_s / 1e12:g}",
            f"{gpu.half_flops_per_s / 1e12:g}",
        )
    console.print(table)
    console.print("Sources: splittune/hardware/virtual/catalog.py", highlight=False)


def _tune_and_save(runner: Runner, out: Path, options: SearchOptions, *, quiet: bool) -> TuneResult:
    """Tune and write the files; when it ends early, by Ctrl-C say, the finished trials are written all the same."""
    callback = _KeepingCallback(SilentCallback() if quiet else ConsoleCallback(console))
    _log_above_the_bar(quiet=quiet)
    try:
        with _sigterm_as_exit():
            result = tune(runner, options, callback)
    except BaseException as error:
        if callback.cards is not None and callback.trials:
            save_tables(out, callback.trials, callback.cards.devices, is_modelled=callback.cards.is_modelled)
            console.print(f"{len(callback.trials)} finished trials are kept in {out}/trials.csv", highlight=False)
        if isinstance(error, KeyboardInterrupt):
            console.print("Interrupted; the model is as it was. With --storage FILE a search goes on where it stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    result.save(out)
    return result


def _log_above_the_bar(*, quiet: bool) -> None:
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", handlers=[_LinesAboveTheBar()], force=True)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, leaves the way Ctrl-C does: the job is put back and finished trials are kept."""

    def leave(_number: int, _frame: object) -> None:
        sys.exit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _LinesAboveTheBar(logging.Handler):
    """Log records as lines of the console, which keeps a progress bar below them; never wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)


class _KeepingCallback:
    """Passes everything on, and keeps the finished trials and what they ran on."""

    def __init__(self, callback: ConsoleCallback | SilentCallback) -> None:
        self.trials: list[Trial] = []
        self.cards: DeviceView | None = None
        self.on_measure = callback.on_measure
        self.on_end = callback.on_end
        self._callback = callback

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None:
        self.cards = cards
        self._callback.on_start(cards, space, max_trials)

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._callback.on_trial(trial)


def _names_cuda_devices(devices: str | None) -> bool:
    """Whether trials are to run on CUDA devices that are there; asking makes no context on them."""
    names = [] if devices is None else [name.strip().partition(":")[0] for name in devices.split(",")]
    return all(name == "cuda" or name.isdecimal() for name in names) and count_visible_devices() > 0


def _show_step(step: int, loss: float) -> None:
    if step == 1 or step % 5 == 0:
        console.print(f"step {step:>2}  loss {loss:.3f}", highlight=False)


def _fail(error: SplittuneError, code: int) -> None:
    Console(stderr=True).print(f"splittune: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)
