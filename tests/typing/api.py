"""The public API as its users write it, for a type checker: `make check` reads this with mypy --strict, nobody runs it.

Each function is a use that must stay legal; `assert_type` says what a user's editor shows. A line with a
``type: ignore`` is a mistake that must be found: mypy complains of an ignore that nothing needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import splittune
from splittune import (
    BalancedDataParallel,
    BatchSplit,
    ConfigError,
    DeviceError,
    Foretold,
    InvalidSplitError,
    Measurement,
    MicroBatch,
    NoFeasibleSplitError,
    NvmlUnavailableError,
    Outcome,
    Plan,
    RanksError,
    SplitConfig,
    SplitSpace,
    SplittuneError,
    TrainingTask,
    TuneResult,
    Verification,
    WindowError,
    WorkerError,
    accumulate,
    autotune,
    load_state_dict,
    plan,
    verify,
)
from splittune.hardware import CudaHardware, Device, DeviceMemory, Hardware, is_out_of_memory, resolve_hardware
from splittune.parallel.base import SplitModule
from splittune.search import GuidedSampler, SearchResult, Trial, find_best_split, report, suggest_split

model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1)), batch_size=64)


def the_package() -> None:
    assert_type(splittune.__version__, str)
    splittune.autotun  # type: ignore[attr-defined]


def the_plan_of_the_readme() -> None:
    task = TrainingTask(model, loader)
    planned = plan(task, ["4xRTX3090"], global_batch_sizes=[64, 128], storage="runs/plan/plan.json", progress=False)
    assert_type(planned, Plan)
    assert_type(planned.save("runs/plan"), Path)
    planned.plot().savefig("plan.svg")
    result = planned.searches[0].result
    if result is not None:
        assert_type(result.config.wrap(model, devices=["cuda:0", "cuda:1"], sync_batch_norm=True), SplitModule)
    plan(task)  # type: ignore[call-arg]


def the_loop_of_the_readme() -> None:
    result = autotune(model, loader)
    assert_type(result, TuneResult)
    assert_type(result.save("runs/split"), Path)
    assert_type(result.foretold, Foretold | None)
    wrapped = result.config.wrap(model)
    assert_type(wrapped, SplitModule)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for batch in loader:
        for micro in result.config.micro_batches(batch, wrapped):
            assert_type(micro, MicroBatch)
            assert_type(micro.weight, float)
            inputs, targets = micro.batch
            loss = nn.functional.mse_loss(wrapped(inputs), targets.to(wrapped.output_device)) * micro.weight
            loss.backward()
        optimizer.step()


def every_option() -> None:
    def step(wrapped: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = wrapped(batch[0]).mean()
        return loss

    autotune(
        model,
        loader,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        devices=["cuda:1", 0, torch.device("cuda", 2)],
        global_batch_size=64,
        autocast_dtype=torch.bfloat16,
        min_headroom_bytes=[0, 0, 0],
        max_trials=8,
        timeout_s=600.0,
        storage=Path("study.db"),
        loss_placement="either",
        shares="each",
        sampler="tpe",
        seed=1,
        progress=False,
    )
    autotune(model, loader, step_fn=step, devices="4xV100-16GB", optimizer=torch.optim.SGD(model.parameters()))
    autotune("job.py:make_task", isolation="process", trial_timeout_s=60)
    autotune(make_task, isolation="process")
    autotune(model, loader, shares="some")  # type: ignore[arg-type]
    autotune(model, loader, bach_size=8)  # type: ignore[call-arg]


def make_task() -> TrainingTask:
    return TrainingTask(model, loader, loss_fn=nn.functional.mse_loss, global_batch_size=64)


def what_was_found(result: TuneResult) -> None:
    assert_type(result.best, Measurement)
    assert_type(result.baseline, Measurement | None)
    assert_type(result.speedup, float | None)
    assert_type(result.explanation, str)
    assert_type(result.trials, tuple[Trial, ...])
    measurement = result.trials[0].measurement
    assert_type(measurement.outcome, Outcome)
    assert_type(measurement.throughput, float | None)
    assert_type(measurement.split, BatchSplit)
    assert_type(measurement.memory, tuple[DeviceMemory, ...])
    assert_type(measurement.memory[0].headroom_bytes, int)
    measurement.throughput = 1.0  # type: ignore[misc]


def a_config(config: SplitConfig) -> None:
    assert_type(config.save("split.json"), Path)
    assert_type(SplitConfig.load(Path("split.json")), SplitConfig)
    assert_type(config.split.shard_sizes, tuple[int, ...])
    assert_type(config.devices, tuple[Device, ...])
    config.wrap(model, nn.functional.mse_loss, weight_fn=lambda targets: float(targets.sum()), devices=["cuda:0"])
    assert_type(config.wrap(model, ddp_options={"gradient_as_bucket_view": True}, timeout_s=120), SplitModule)
    for batch in config.shard(loader, seed=1):
        assert_type(next(config.micro_batches(batch)), MicroBatch)
    load_state_dict(model, model.state_dict())
    verification = verify(config, make_task(), devices="4xV100-16GB", num_steps=5, measure_eval_batch_size=True)
    assert_type(verification, Verification)
    assert_type(verification.is_verified, bool)
    assert_type(verification.suggested_min_headroom_bytes, int | None)


def a_wrapper() -> None:
    wrapped = BalancedDataParallel(4, model, device_ids=[0, 1])  # as the published wrapper is called
    wrapped = BalancedDataParallel(module=model, shard_sizes=(4, 6), loss_fn=nn.functional.mse_loss)
    assert_type(wrapped.unwrap(), nn.Module)
    assert_type(wrapped.output_device, torch.device)
    for part in accumulate(wrapped, [torch.zeros(10, 4), torch.zeros(7, 4)]):
        assert_type(part, Tensor)
        wrapped(part).mean().backward()
    with wrapped.no_sync():
        wrapped(torch.zeros(10, 4)).mean().backward()


def splits() -> Iterator[BatchSplit]:
    space = SplitSpace(global_batch_size=64, num_devices=4, shares="each", min_shard_size=1, max_accumulation_steps=8)
    yield BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(1, 5, 5, 5))
    yield BatchSplit.even(global_batch_size=64, accumulation_steps=4, num_devices=4)
    yield BatchSplit.with_gpu0(global_batch_size=64, accumulation_steps=4, num_devices=4, gpu0_bsz=1)
    yield from space
    BatchSplit(64, 4, (1, 5, 5, 5))  # type: ignore[call-arg]


def a_search_of_ones_own(space: SplitSpace) -> None:
    def measure(split: BatchSplit) -> Measurement:
        return Measurement(split=split, outcome=Outcome.OK, micro_step_times_s=(0.1,), update_times_s=(0.01,))

    def objective(trial: optuna.Trial) -> float:
        return report(trial, measure(suggest_split(trial, space)))

    found = find_best_split(space, measure, max_trials=12, min_headroom_bytes=[0, 0, 0, 0], storage="study.db")
    assert_type(found, SearchResult)
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(space, min_headroom_bytes=0))
    study.optimize(objective, n_trials=12)


def devices() -> None:
    hardware = resolve_hardware("1xRTX3090,3xRTX4090")
    assert_type(hardware, Hardware)
    assert_type(hardware.devices, tuple[Device, ...])
    with hardware.metered():
        assert_type(hardware.memory(), tuple[DeviceMemory, ...])
    resolve_hardware(None)
    resolve_hardware([0, "cuda:1"])
    CudaHardware([torch.device("cuda", 0)])


def errors() -> int:
    try:
        autotune(model, loader)
    except torch.OutOfMemoryError as error:
        assert_type(is_out_of_memory(error), bool)
    except (NoFeasibleSplitError, NvmlUnavailableError, DeviceError, WindowError, WorkerError, RanksError) as error:
        problem: SplittuneError = error
        print(problem)
    except (ConfigError, InvalidSplitError) as error:
        refused: ValueError = error
        print(refused)
    return 0
