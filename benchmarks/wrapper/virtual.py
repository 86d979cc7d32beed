"""Bytes over the links and modelled step time: one broadcast per window against one per micro-batch.

    python -m benchmarks.wrapper [--out benchmarks/results]

Both engines of BalancedDataParallel run the same steps on the same four virtual GPUs, in one run. ``torch`` copies the
parameters out and reduces the gradients at every micro-batch, as nn.DataParallel does; ``window`` once per optimizer
step. Memory and bytes are accounted, time is modelled. What the engines cost the host is measured: `host`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.jobs.workloads import digits_cnn
from benchmarks.wrapper import host
from splittune.demo import byte_gpt
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.parallel import accumulate
from splittune.split import BatchSplit

DEVICES = "4xRTX3090"
ACCUMULATION_STEPS = (1, 2, 4, 8)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, as in ResNet-18."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolutions(x) + self.shortcut(x))


def resnet18(num_classes: int = 10) -> nn.Sequential:
    """ResNet-18's widths and depths (11.2 million parameters) with a stem for small images of one channel."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for num_out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(ResidualBlock(width, num_out, stride))
        width = num_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def workloads() -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """(name, model, inputs, targets) with real data: text of the standard library, scikit-learn's digits."""
    torch.manual_seed(0)
    task = byte_gpt(64)
    inputs, targets = next(iter(task.loader))
    yield "byte GPT, 0.9 M parameters", task.model, inputs, targets
    images, labels = next(iter(digits_cnn(batch_size=64).loader))
    yield "ResNet-18 on digits, 11.2 M parameters", resnet18(), images, labels


def measure(
    hardware: VirtualHardware, model: nn.Module, inputs: Tensor, targets: Tensor, k: int, engine: Any
) -> dict[str, Any]:
    """The second of two optimizer steps (the first makes the optimizer's state): bytes, time and peak of GPU 0."""
    split = BatchSplit.even(global_batch_size=len(inputs), accumulation_steps=k, num_devices=len(hardware.devices))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    with hardware.metered():
        wrapped = hardware.wrap(model, split, engine=engine)
        for _ in range(2):
            hardware.reset_peaks()
            started_s, bytes_before = hardware.clock(), hardware.link_bytes()
            for x, y in accumulate(
                wrapped, zip(inputs.split(split.micro_batch_sizes), targets.split(split.micro_batch_sizes), strict=True)
            ):
                output = wrapped(x)
                loss = functional.cross_entropy(output.flatten(0, -2), y.flatten().to(wrapped.output_device))
                (loss * (len(x) / len(inputs))).backward()
            optimizer.step()
            optimizer.zero_grad()
            step_time_s = hardware.clock() - started_s
        return {
            "link_mib_gpu0": (hardware.link_bytes()[0] - bytes_before[0]) / 2**20,
            "step_time_ms": step_time_s * 1e3,
            "peak_allocated_mib_gpu0": hardware.memory()[0].peak_allocated_bytes / 2**20,
        }


def main() -> None:
    """Run both engines on both workloads, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    hardware = resolve_hardware(DEVICES)
    rows = []
    for name, model, inputs, targets in workloads():
        for k in ACCUMULATION_STEPS:
            for engine in ("torch", "window"):
                row = measure(hardware, model, inputs, targets, k, engine)
                rows.append({"workload": name, "accumulation_steps": k, "engine": engine, **row})
                print(
                    f"{name}  k={k}  {engine:<6}  {row['link_mib_gpu0']:9.1f} MiB over GPU 0's link  "
                    f"{row['step_time_ms']:8.2f} ms (modelled)  peak {row['peak_allocated_mib_gpu0']:7.1f} "
                    "MiB"
                )
    frame = pd.DataFrame(rows).assign(
        devices=DEVICES, is_modelled=True, torch=str(torch.__version__), python=platform.python_version(), seed=0
    )
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "wrapper.csv", index=False, float_format="%.4f")
    wide = frame.pivot(index=["workload", "accumulation_steps"], columns="engine", values="step_time_ms")
    print("\nspeed-up of 'window' over 'torch' (modelled):")
    print((wide["torch"] / wide["window"]).round(2).to_string())
    print("\nthe host's own work, processor milliseconds a micro-step (measured):")
    of_host = pd.DataFrame([row for job in host.jobs() for row in host.measure(*job)])
    print(of_host.round(2).to_string(index=False))
    of_host.assign(processor=host.processor(), torch=str(torch.__version__), python=platform.python_version()).to_csv(
        out / "wrapper_host.csv", index=False, float_format="%.4f"
    )
