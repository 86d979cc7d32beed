"""autotune() as a collective: called on every rank of a process group, it gives all of them the same result."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from splittune.cards import is_card, kind_of_cards, module_of
from splittune.config.data import current_versions
from splittune.config.in_ranks import signature_of
from splittune.errors import ConfigError
from splittune.hardware import Hardware, resolve_hardware
from splittune.hardware.resolve import names_virtual_gpus
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import MAX_RANKS
from splittune.modelled_ddp import tune_ranks
from splittune.options import SearchOptions, StrategyChoice
from splittune.ranks.agreement import ARRIVAL_TIMEOUT_S, Fact, agree
from splittune.ranks.group import check_backend, device_of_rank, is_grouped
from splittune.report import TuneResult
from splittune.runners.base import JobFacts
from splittune.runners.launch.rank import Bounded
from splittune.runners.ranks.control import DEFAULT_WAIT_S, ControlGroup
from splittune.runners.ranks.crew import Crew, Member, follow, speaking
from splittune.runners.ranks.journal import TrialJournal
from splittune.runners.ranks.memo import AnswerMemo
from splittune.runners.ranks.own_card import OwnRealCard
from splittune.runners.ranks.runner import Present, RanksRunner, introduce
from splittune.runners.ranks.virtual import CardsOfRanks, OwnCard
from splittune.training import TrainingTask
from splittune.training.said import each_said_once
from splittune.tuner import Devices, TuneCallback, tune

# Of the time for which ranks wait for one another, the part for a synchronised step: where one fails in it, the others
# have given it up by the time at which all agree on that. A choice.
STEP_PART = 0.5


def is_collective() -> bool:
    """Whether this process is one of several ranks, which tune together."""
    return is_grouped() and dist.get_world_size() > 1


def is_leader() -> bool:
    """Whether this process speaks for all ranks, or there are none."""
    return not is_collective() or dist.get_rank() == 0


def tune_together(
    make_task: Callable[[], TrainingTask],
    devices: Devices,
    options: SearchOptions,
    callback: TuneCallback,
    *,
    strategy: StrategyChoice = "ddp",
    arrival_timeout_s: float = ARRIVAL_TIMEOUT_S,
    wait_s: float = DEFAULT_WAIT_S,
    journal: TrialJournal | None = None,
    check_first: Callable[[], None] | None = None,
    end_after_s: float | None = None,
) -> TuneResult:
    """Tune a job on the ranks of the process group that this process is in; a collective, with the same result on all.

    Rank 0 searches, logs, shows what goes on, and keeps the trials in its storage.

    Args:
        make_task: makes this rank's job, the same on all; what it raises of splittune's own errors is every rank's.
        devices: as many virtual cards as there are ranks, of which rank r takes card r; of real ones None, for the
            card of each rank's LOCAL_RANK, or one for each rank.
        options: alike on all ranks, but for the storage, which is rank 0's.
        callback: rank 0's.
        strategy: "ddp".
        arrival_timeout_s: seconds for ranks to arrive here.
        wait_s: seconds for which a rank waits for the others in the search at most; half that in a synchronised step.
        journal: rank 0's, of the trial on its way; None for one beside the storage, where there is a storage.
        check_first: rank 0 calls it before anything else: that it can write where it shall, say. What it raises of
            splittune's own errors is every rank's.
        end_after_s: seconds after which a rank's part of a trial has its process ended, for a hang is ended by nothing
            else; None where the process is the user's own.

    Raises:
        ConfigError: the jobs differ, or cannot be used; on every rank, before the first trial.
        NoFeasibleSplitError: nothing fits; on every rank.
        RanksError: a rank was lost, or has not come in time; on those that are left.
    """
    with speaking(is_leader()), each_said_once(), ExitStack() as stack:

        def prepare() -> tuple[_Team, list[Fact]]:
            if check_first is not None and is_leader():
                check_first()
            team, facts = _prepared(make_task, devices, options, strategy, wait_s, stack)
            stack.callback(team.card.close)
            return team, facts

        team = agree("autotune", prepare, timeout_s=arrival_timeout_s)
        control = ControlGroup(wait_s=wait_s)
        stack.callback(control.close)
        present = introduce(control, team.job)
        member: Member = team.card if end_after_s is None else Bounded(team.card, end_after_s)
        if is_leader():
            return _lead(team, present, Crew(control, member), options, callback, journal)
        result: TuneResult = follow(control, member)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Team:
    """What a rank brings: its card, with the job open on it, and all cards where they are virtual."""

    card: OwnCard | OwnRealCard
    job: JobFacts
    hardware: VirtualHardware | None


def _prepared(
    make_task: Callable[[], TrainingTask],
    devices: Devices,
    options: SearchOptions,
    strategy: StrategyChoice,
    wait_s: float,
    stack: ExitStack,
) -> tuple[_Team, list[Fact]]:
    if strategy != "ddp":
        raise ConfigError(
            f'strategy is "{strategy}" in a process group of {dist.get_world_size()} ranks: expected "ddp", for they '
            "tune what they train with."
        )
    card: OwnCard | OwnRealCard
    if names_virtual_gpus(devices):
        hardware = _virtual_cards(devices, options)
        card = OwnCard(make_task(), hardware, dist.get_rank())
    else:
        hardware = None
        own = card_of_rank(devices)
        stack.enter_context(_current(own))
        card = OwnRealCard(make_task(), own, wait_s=STEP_PART * wait_s)
    try:
        job = card.open()
    except BaseException:
        card.close()
        raise
    named = "real cards" if hardware is None else f"{hardware.spec}"  # of those each rank may name its own
    return _Team(card=card, job=job, hardware=hardware), _facts_of(card.task, job, named, options)


def card_of_rank(devices: Devices) -> Hardware:
    """This rank's one card: of those named the one in its place, else that of its LOCAL_RANK on this machine.

    Raises:
        ConfigError: as many devices as ranks were expected, or the group has no backend for them.
        DeviceError: the card is not there.
    """
    kind, rank = kind_of_cards(), dist.get_rank()
    own = device_of_rank([kind] * dist.get_world_size(), kind if devices is None else devices, rank)
    check_backend(own, None)
    return resolve_hardware([own])


def _current(hardware: Hardware) -> AbstractContextManager[object]:
    """Inside, what names no card means this rank's: else every rank would have a context on the first."""
    device = torch.device(hardware.devices[0].torch_device)
    if not is_card(device):
        return nullcontext()
    context: AbstractContextManager[object] = getattr(module_of(device), "device", nullcontext)(device)
    return context


def _virtual_cards(devices: Devices, options: SearchOptions) -> VirtualHardware:
    num_ranks = dist.get_world_size()
    if options.timeout_s is not None:
        raise ConfigError(
            f"timeout_s is {options.timeout_s!r} on virtual cards under ranks: expected None. With max_trials the "
            "search ends sooner."
        )
    hardware = resolve_hardware(devices, max_devices=MAX_RANKS)
    assert isinstance(hardware, VirtualHardware), "no device of torch's is named"
    if len(hardware.gpus) != num_ranks:
        cards = len(hardware.gpus)
        raise ConfigError(
            f"devices names {cards} card{'s' if cards > 1 else ''}, and the process group has {num_ranks} ranks: "
            f"expected one card for each rank. Start as many processes as cards, or name {num_ranks} cards."
        )
    return hardware


def _facts_of(task: TrainingTask, job: JobFacts, devices: str, options: SearchOptions) -> list[Fact]:
    """What all ranks must have alike."""
    same_job = "Build the same job on every rank."
    alike = "Call it alike on every rank."
    size = job.global_batch_size or job.loader_batch_size
    asked = replace(options, storage=None)  # the trials are rank 0's
    facts = {
        **{
            f"the version of {package}": (version, "Install the same on every machine.")
            for package, version in current_versions().items()
            if package != "python"
        },
        "the model": (signature_of(task.model), same_job),
        "the job": (job.title, same_job),
        "the gradient scaler": ("none" if task.grad_scaler is None else "given", same_job),
        "the batch size": (f"{size}", same_job),
        "the loader's batch size": (f"{job.loader_batch_size}", same_job),
        "the devices": (devices, alike),
        "the seed": (f"{asked.seed}", alike),
        "the options": (f"{replace(asked, seed=0)}", alike),
    }
    return [Fact(name=name, value=value, advice=advice) for name, (value, advice) in facts.items()]


def _lead(
    team: _Team,
    present: Sequence[Present],
    crew: Crew,
    options: SearchOptions,
    callback: TuneCallback,
    journal: TrialJournal | None,
) -> TuneResult:
    try:
        if journal is None and options.storage is not None and "://" not in os.fspath(options.storage):
            journal = TrialJournal.beside(options.storage)
        if isinstance(team.card, OwnRealCard):
            runner = RanksRunner(crew, team.card, present, journal=journal)
            result = tune(runner, options, callback, strategy="ddp")
        else:
            result = _search_virtual_cards(team, team.card, crew, options, callback, journal)
        if journal is not None:
            journal.remove()
    except BaseException as error:
        crew.dismiss(error=error)
        raise
    crew.dismiss(result=result)
    return result


def _search_virtual_cards(
    team: _Team,
    own: OwnCard,
    crew: Crew,
    options: SearchOptions,
    callback: TuneCallback,
    journal: TrialJournal | None,
) -> TuneResult:
    assert team.hardware is not None, "virtual cards are told by their names"
    memo = None if options.storage is None else AnswerMemo(options.storage, _search_of(team.job, team.hardware))
    with nullcontext() if memo is None else memo.alone():
        cards = CardsOfRanks(crew, own, team.job, memo=memo, journal=journal)
        return tune_ranks(cards, team.hardware, options, callback).result


def _search_of(job: JobFacts, hardware: VirtualHardware) -> str:
    """Tells the trials of this job on these cards from others; what is demanded free is judged anew."""
    versions = current_versions()
    cards = hardware.spec or "+".join(gpu.name for gpu in hardware.gpus)
    return f"{job.title} on {cards}, with splittune {versions['splittune']} and torch {versions['torch']}"
