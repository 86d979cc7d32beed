"""The wrapper on one CUDA card named three times, beside torch's nn.DataParallel where torch allows it.

    python -m benchmarks.wrapper.cuda [--out benchmarks/results]

Prints, for each engine, the largest relative difference of the gradients from one device's, in
float32 and where convolutions may round to TF32, as torch lets them by default, and the median host
time of a micro-step (the host's, since the card runs the three replicas one after another). Writes
``wrapper_cuda.csv`` with the card, its driver and the versions. ``--device cpu`` runs the same
script without a card, to see that it works: its times say nothing, and nothing is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.wrapper.virtual import workloads
from splittune.errors import NvmlUnavailableError
from splittune.hardware.cuda.nvml import Nvml
from splittune.parallel import BalancedDataParallel, accumulate

NUM_REPLICAS = 3
ACCUMULATION_STEPS = 8
NUM_STEPS = 10


def step(model: nn.Module, inputs: Tensor, targets: Tensor, times_s: list[float] | None = None) -> None:
    """Gradients of one optimizer step in equal micro-batches."""
    parts = zip(inputs.chunk(ACCUMULATION_STEPS), targets.chunk(ACCUMULATION_STEPS), strict=True)
    for x, y in accumulate(model, parts):
        started_s = time.perf_counter()
        loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        (loss * (len(x) / len(inputs))).backward()
        if times_s is not None:
            times_s.append(time.perf_counter() - started_s)


def gradients(model: nn.Module) -> list[Tensor]:
    """The parameters' gradients, copied."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def compare(make: Callable[[], nn.Module], module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Errors against one device, and host time. BatchNorm is in eval mode: its statistics depend on the shards."""
    module.eval()
    wrapped = make()
    with cudnn_rounding(to_tf32=False):
        exact = error_of(wrapped, module, inputs, targets)
    with cudnn_rounding(to_tf32=True):
        rounded = error_of(wrapped, module, inputs, targets)
        times_s: list[float] = []
        for _ in range(NUM_STEPS):
            module.zero_grad()
            step(wrapped, inputs, targets, times_s)
    return {
        "largest_relative_error": exact,
        "largest_relative_error_tf32": rounded,
        "host_time_per_micro_step_ms": median(times_s) * 1e3,
    }


def error_of(wrapped: nn.Module, module: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The largest relative difference of a parameter's gradient through the wrapper from the module's own."""
    module.zero_grad()
    step(module, inputs, targets)
    expected = gradients(module)
    module.zero_grad()
    step(wrapped, inputs, targets)
    return max(
        float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
        for ours, theirs in zip(gradients(module), expected, strict=True)
    )


@contextmanager
def cudnn_rounding(*, to_tf32: bool) -> Iterator[None]:
    """Whether convolutions may round to TF32: ten bits, and by kernels that differ with the size of a shard."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = to_tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    driver = "unknown"
    try:
        with Nvml() as nvml:
            driver = nvml.driver_version()
    except NvmlUnavailableError as error:
        print(f"the driver's version is unknown: {error}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"card": name, "driver": driver, "torch": str(torch.__version__), "cuda": str(torch.version.cuda), "seed": 0}


def engines(module: nn.Module, device: torch.device) -> dict[str, Callable[[], nn.Module]]:
    """What is compared, by name: each makes a wrapper of `module` over one device named several times."""
    devices = [device] * NUM_REPLICAS
    makers: dict[str, Callable[[], nn.Module]] = {
        "window": lambda: BalancedDataParallel(1, module, devices, engine="window"),
        "torch": lambda: BalancedDataParallel(1, module, devices, engine="torch"),
    }
    if device.type == "cuda":
        makers["nn.DataParallel"] = lambda: nn.DataParallel(module, [0] * NUM_REPLICAS)
    return makers


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each workload and engine, printed as it comes."""
    for name, model, inputs, targets in workloads():
        module, x, y = model.to(device), inputs.to(device), targets.to(device)
        for engine, make in engines(module, device).items():
            try:
                row = compare(make, module, x, y)
            except RuntimeError as error:  # torch may refuse a card that is named more than once
                print(f"{name}  {engine}: {error}")
                continue
            print(
                f"{name}  {engine:<16} largest relative error {row['largest_relative_error']:.1e} "
                f"({row['largest_relative_error_tf32']:.1e} with TF32)  "
                f"host {row['host_time_per_micro_step_ms']:8.2f} ms a micro-step"
            )
            yield {"workload": name, "engine": engine, "accumulation_steps": ACCUMULATION_STEPS, **row}


def main() -> None:
    """Run the comparison; on a card, write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible. --device cpu shows that the script runs, and measures nothing.")
    rows = list(measure(device))
    if device.type == "cuda":
        arguments.out.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows).assign(**machine(device))
        frame.to_csv(arguments.out / "wrapper_cuda.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
