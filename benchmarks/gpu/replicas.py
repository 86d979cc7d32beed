"""Part 9 of `benchmarks.gpu`: the wrapper over the card named three times, beside nn.DataParallel in the same run.

What a second card would add, the links between them, is not in these figures: what each forward leaves to the host and
to its threads is.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.stage import Findings, Stage
from benchmarks.gpu.timing import cudnn_searching
from benchmarks.jobs.gpu_models import make
from benchmarks.wrapper.cuda import ACCUMULATION_STEPS, NUM_REPLICAS, engines
from splittune.cards import is_card, module_of
from splittune.parallel import accumulate
from splittune.parallel.link import TorchLink
from splittune.training import TrainingTask
from splittune.units import MIB

NUM_FORWARDS = 8
NUM_STEPS = 5
# A search for kernels takes many times what the kernels take.
SEARCHED_ONCE = 0.5
# Two timings of the same work may differ by this much.
NOISE = 1.10
# For the card to be busy, in its own cycles: half a second or so.
BUSY_CYCLES = 1_000_000_000

_PEER = "nn.DataParallel"


def run(stage: Stage, findings: Findings) -> None:
    """A row for each engine; a virtual GPU's rehearsal runs on the CPU, and tells nothing."""
    device = torch.device("cpu") if stage.is_rehearsal else stage.torch_device
    convolutions, gpt = make("CNN", stage.sizes, stage.seed).task(), make("GPT", stage.sizes, stage.seed).task()
    for task in (convolutions, gpt):
        task.model.to(device)
    with stage.hardware.metered():
        for engine in engines(gpt.model, device):
            try:
                found = _forwards(stage, engine, convolutions), _steps(stage, engine, gpt)
            except RuntimeError as error:
                if engine != _PEER:
                    raise
                # torch may refuse a card that is named more than once
                findings.check(f"{engine} takes a card named {NUM_REPLICAS} times", None, str(error).splitlines()[0])
                continue
            findings.rows.append({"engine": engine, **found[0], **found[1]})
    stage.table(findings.rows)
    _judge(findings, device)
    if is_card(device):
        _inputs(findings, device)


def _forwards(stage: Stage, engine: str, task: TrainingTask) -> dict[str, Any]:
    """The first forward, which searches for kernels, and the later ones, which need not: cuDNN keeps them by thread."""
    wrapped, (inputs, _), times_s = *_wrapped(engine, task), []
    with cudnn_searching():
        for _ in range(NUM_FORWARDS):
            began_s = _now_s(stage)
            wrapped(inputs)
            times_s.append(_now_s(stage) - began_s)
    return {"first_forward_ms": 1e3 * times_s[0], "later_forward_ms": 1e3 * median(times_s[NUM_FORWARDS // 2 :])}


def _now_s(stage: Stage) -> float:
    """Once the card has finished; a rehearsal runs outside of its virtual GPU, by the host's clock."""
    return time.perf_counter() if stage.is_rehearsal else stage.hardware.clock()


def _steps(stage: Stage, engine: str, task: TrainingTask) -> dict[str, Any]:
    """What the host does for a micro-step, and what a step leaves on the card while its loss is kept.

    What the first step of all takes for good, such as the workspaces of cuBLAS (32 MiB for each stream of an H100), is
    taken before: a first step's loss is let go of.
    """
    wrapped, batch = _wrapped(engine, task)
    loss_fn = task.loss_fn
    assert loss_fn is not None, "every job of a benchmark has one"
    times_s: list[float] = []
    parts = list(zip(*(tensor.chunk(ACCUMULATION_STEPS) for tensor in batch), strict=True))

    def step() -> Tensor:
        for inputs, targets in accumulate(wrapped, parts):
            began_s = time.perf_counter()
            loss = loss_fn(wrapped(inputs), targets) * (len(inputs) / len(batch[0]))
            loss.backward()
            times_s.append(time.perf_counter() - began_s)
        task.model.zero_grad(set_to_none=True)
        return loss

    step()
    before = stage.hardware.allocated_bytes()[0]
    for _ in range(NUM_STEPS - 1):
        loss = step()
    held = stage.hardware.allocated_bytes()[0] - before
    del loss
    return {"host_ms": 1e3 * median(times_s[len(parts) :]), "held_after_step_mib": held / MIB}


def _wrapped(engine: str, task: TrainingTask) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The job's model wrapped so, and its batch where that is."""
    device = next(task.model.parameters()).device
    inputs, targets = next(iter(task.loader))
    return engines(task.model, device)[engine](), (inputs.to(device), targets.to(device))


def _judge(findings: Findings, device: torch.device) -> None:
    """What stands in for a card has its memory, and not its times."""
    has_times, has_memory = device.type == "cuda", is_card(device)
    rows = {row["engine"]: row for row in findings.rows}
    ours, peer = rows["window"], rows.get(_PEER)
    findings.check(
        "kernels are searched for in the first forward alone",
        ours["later_forward_ms"] <= SEARCHED_ONCE * ours["first_forward_ms"] if has_times else None,
        f"first {ours['first_forward_ms']:.1f} ms, later {ours['later_forward_ms']:.1f} ms",
    )
    findings.check(
        "no more stays on the card after a step than with torch's engine, the loss kept",
        ours["held_after_step_mib"] <= rows["torch"]["held_after_step_mib"] + 1 if has_memory else None,
        f"{ours['held_after_step_mib']:.1f} MiB, and {rows['torch']['held_after_step_mib']:.1f} MiB",
    )
    for figure, what in (("later_forward_ms", "a forward"), ("host_ms", "the host's part of a micro-step")):
        findings.check(
            f"{what} takes no longer than {_PEER}'s",
            None if peer is None or not has_times else ours[figure] <= NOISE * peer[figure],
            f"{ours[figure]:.2f} ms, and {'unknown' if peer is None else f'{peer[figure]:.2f} ms'}",
        )


def _inputs(findings: Findings, card: torch.device) -> None:
    """Whether a pinned batch reaches a card that is busy before it is done."""
    module, link = module_of(card), TorchLink([card])
    try:
        batch = torch.ones(8 * MIB // 4).pin_memory()
    except (RuntimeError, NotImplementedError) as error:
        findings.check("pinned inputs go ahead of a busy card's work", None, f"memory cannot be pinned here: {error}")
        return
    link.copy(batch, card)  # its memory is there
    module.synchronize(card)
    with module.device(card):
        module._sleep(BUSY_CYCLES)
    began_s = time.perf_counter()
    arrived = link.copy(batch, card)
    host_s = time.perf_counter() - began_s
    done = module.Event()
    done.record(module.current_stream(card))
    is_early = not done.query()
    module.synchronize(card)
    findings.check(
        "the host goes on at once where a card is busy, and its pinned inputs are right",
        is_early and bool((arrived == 1).all()),
        f"{1e3 * host_s:.2f} ms to ask for 8 MiB",
    )
