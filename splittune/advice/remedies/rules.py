"""Rules: what would change the user's code, or cannot be timed here, with the search's figures where they bear."""

from __future__ import annotations

from torch import nn, optim
from torch.utils.data import DataLoader

from splittune.advice.case import Case, Finding, Remedy, rule
from splittune.report.diagnosis import LARGE_PART, SMALL_PART
from splittune.training.loader_rate import what_to_set
from splittune.units import format_bytes

_INPLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Dropout, nn.Hardswish)


def _checkpointing(case: Case) -> Finding | None:
    parts = case.result.diagnosis.parts
    if parts is None or not parts.per_share_bytes or parts.per_share_bytes < LARGE_PART * parts.peak_bytes:
        return None
    return rule(
        f"Of GPU {parts.device}'s peak of {format_bytes(parts.peak_bytes)} the share's activations are about "
        f"{format_bytes(parts.per_share_bytes)}; most of them can be computed again in the backward instead of kept, "
        "for about one forward more. It is worth that where it saves accumulation steps, or where nothing fits."
    )


def _in_place(case: Case) -> Finding | None:
    if case.task is None:
        return None
    found = [each for each in case.task.model.modules() if isinstance(each, _INPLACE) and not each.inplace]
    if not found:
        return None
    kinds = ", ".join(sorted({type(each).__name__ for each in found}))
    return rule(
        f"{len(found)} modules ({kinds}) write their result beside their input. With inplace=True the one takes the "
        "other's place, where nothing else reads the input: torch raises in the backward where something does."
    )


def _optimizer(case: Case) -> Finding | None:
    update, step = case.result.best.update_time_s, case.result.best.step_time_s
    same = [trial.measurement for trial in case.result.trials if trial.measurement.split == case.split]
    timed = next((each for each in same if each.update_time_s and each.step_time_s), None)
    if timed is not None:
        update, step = timed.update_time_s, timed.step_time_s
    if update is None or step is None or update < SMALL_PART * step:
        return None
    kind = " (modelled)" if case.is_modelled else ""
    maker = case.task.optimizer if case.task is not None else None
    is_fused = isinstance(maker, optim.Optimizer) and any(group.get("fused") for group in maker.param_groups)
    fused = "" if is_fused else "fused=True (Adam, AdamW, SGD) makes one kernel of it; "
    return rule(
        f"The update, with what happens once a step, is {update / step:.0%} of a step{kind}: so much can be gained at "
        f"most. {fused}ZeroRedundancyOptimizer, over ranks, shares its time and its state out among the cards."
    )


def _evaluation(_: Case) -> Finding | None:
    return rule(
        "Under torch.no_grad() no activations are kept: evaluation takes several times the samples of training at "
        "once. config.wrap(model) spreads them, its eval_batch_size as `splittune verify` finds it; without no_grad "
        "evaluation runs out of memory where training does not."
    )


def _loader(case: Case) -> Finding | None:
    if case.task is None or not isinstance(case.task.loader, DataLoader):
        return None
    loader = case.task.loader
    said = [] if loader.num_workers and loader.pin_memory else [what_to_set(loader)]
    size, length = loader.batch_size, _length_of(loader)
    if size and length and not loader.drop_last and length % size:
        said.append(
            f"The last batch of an epoch has {length % size} of {size} samples, and leaves cards idle or with small "
            "shares; drop_last=True leaves it out."
        )
    if not said:
        return None
    return rule(" ".join(said))


def _length_of(loader: DataLoader[object]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]  # a data set that is iterated over has none
    except TypeError:
        return None


CHECKPOINTING = Remedy(
    name="activation checkpointing",
    cost="About a third more compute; torch.utils.checkpoint around the model's blocks.",
    look=_checkpointing,
    takes_trials=False,
)
IN_PLACE = Remedy(
    name="in-place activations",
    cost="An argument of these modules.",
    look=_in_place,
    takes_trials=False,
)
OPTIMIZER = Remedy(
    name="a fused or sharded optimizer",
    cost="An argument of the optimizer, or ranks.",
    look=_optimizer,
    takes_trials=False,
)
EVALUATION = Remedy(
    name="evaluation under no_grad, with a batch size of its own",
    cost="A line around it.",
    look=_evaluation,
    takes_trials=False,
)
LOADER = Remedy(
    name="the loader: workers, pinned memory, drop_last",
    cost="Arguments of the DataLoader.",
    look=_loader,
    takes_trials=False,
)
