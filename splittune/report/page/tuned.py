"""The page of a search: the answer, where memory goes, what was tried, one step, every trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot

from splittune.config.split_config import SplitConfig
from splittune.hardware.virtual.efficiency import MEDIAN_TIME_ERROR
from splittune.profiling.measurement import Measurement
from splittune.report.page.advised import advice_section
from splittune.report.page.document import document, headline, pictured, section, tile, tiles
from splittune.report.page.markup import Markup, tag
from splittune.report.page.memory import CardMemory, card_memories, memory_picture
from splittune.report.page.modules import modules_picture, modules_table
from splittune.report.page.picture import Picture, cut
from splittune.report.page.search import history, split_map, tried_text
from splittune.report.page.source import BusyRow, SearchFiles, TrialRow
from splittune.report.page.step import StepTimes, step_picture, step_table
from splittune.report.page.tables import memory_tables, trials_table
from splittune.report.page.today import beside_today
from splittune.report.result_file import Found
from splittune.report.words import (
    CUT_SHORT,
    LEAST_SPEEDUP,
    WHY_STOPPED,
    count_of,
    describe_model_error,
    rate_of,
    shape_of,
    shares_of,
)
from splittune.search.result import speedup_over
from splittune.units import format_bytes, format_time


def search_page(files: SearchFiles) -> str:
    """``report.html`` of a search that found a split."""
    config, found = files.config, files.found
    assert config is not None, "without one the tables alone are reported"
    assert found is not None, "it was read with the config"
    tuned, even = _tuned_cards(config, found), _even_cards(config, found)
    numbers = memory_tables(f"The tuned split, {shape_of(found.best.split)}.", tuned)
    if even and found.baseline is not None:
        numbers += memory_tables(f"The even split, {shape_of(found.baseline.split)}.", even)
    numbers.append(tag("p", _how_memory_is_known(config.is_modelled), class_="note"))
    pictures, times = search_pictures(files), _step_times(files.trials, files.cards, config)
    body = [
        _answer(config, found, files.trials),
        _why(found),
        beside_today(found.best, found.baseline, files.trials, _kind(config)),
        advice_section(files.advice),
        pictured(pictures["memory"], *numbers) if "memory" in pictures else None,
        _pictured_modules(found),
        None if times is None else pictured(pictures["step"], step_table(times)),
        *pictured_trials(pictures, files.trials, row_of(files.trials, found.best)),
    ]
    return document(f"splittune: {_headline(found)}", body, _footer(config))


def _pictured_modules(found: Found) -> Markup | None:
    if not found.modules:
        return None
    samples = max(found.best.split.shard_sizes)
    return pictured(modules_picture(found.modules, samples), modules_table(found.modules, samples))


def pictured_trials(pictures: Mapping[str, Picture], trials: Sequence[TrialRow], best: TrialRow | None) -> list[Markup]:
    """The pictures of the search, the last with every trial beneath."""
    shown = [pictured(pictures["map"])] if "map" in pictures else []
    if "history" in pictures:
        shown.append(pictured(pictures["history"], trials_table(trials, best), class_="long"))
    elif trials:
        shown.append(section("Every trial", trials_table(trials, best), class_="long"))
    return shown


def search_pictures(files: SearchFiles) -> dict[str, Picture]:
    """The pictures of a search, by name: those whose figures are known."""
    config, found = files.config, files.found
    pictures: dict[str, Picture] = {}
    best, baseline = fastest_of(files.trials), None
    if config is not None and found is not None:
        best, baseline = row_of(files.trials, found.best), row_of(files.trials, found.baseline)
        tuned = _tuned_cards(config, found)
        if tuned:
            pictures["memory"] = memory_picture(tuned, _even_cards(config, found), is_modelled=config.is_modelled)
        times = _step_times(files.trials, files.cards, config)
        if times is not None:
            pictures["step"] = step_picture(times, is_modelled=config.is_modelled)
    if files.trials:
        pictures["map"] = split_map(files.trials, best, baseline)
        even_rate = None if found is None or found.baseline is None else found.baseline.throughput
        stopped = "" if found is None else _why_stopped(found.stopped)
        if any(row.throughput is not None for row in files.trials):
            pictures["history"] = history(files.trials, even_rate, stopped)
    return pictures


def fastest_of(trials: Sequence[TrialRow]) -> TrialRow | None:
    """The trial of most samples a second among those that fit."""
    fitting = [row for row in trials if row.fits and row.throughput is not None]
    return max(fitting, key=lambda row: row.throughput or 0.0, default=None)


def row_of(trials: Sequence[TrialRow], run: Measurement | None) -> TrialRow | None:
    """The last row of a measurement's split that fits."""
    if run is None:
        return None
    shape = (run.split.accumulation_steps, run.split.shard_sizes, run.loss_placement)
    return next((row for row in reversed(trials) if row.shape == shape and row.fits), None)


def _tuned_cards(config: SplitConfig, found: Found) -> tuple[CardMemory, ...]:
    return card_memories(found.best, found.best_parts, config.devices, config.min_headroom_bytes)


def _even_cards(config: SplitConfig, found: Found) -> tuple[CardMemory, ...]:
    if found.baseline is None or found.baseline.split == found.best.split:
        return ()
    return card_memories(found.baseline, found.baseline_parts, config.devices, config.min_headroom_bytes)


def _answer(config: SplitConfig, found: Found, trials: Sequence[TrialRow]) -> Markup:
    best, even = found.best, found.baseline
    kind = _kind(config)
    cards = config.virtual_spec or _names(config)
    kicker = " · ".join(each for each in (found.job, cards) if each)
    steps = count_of(best.split.accumulation_steps, "accumulation step")
    tried = tried_text(len(trials), "trial", sum(not row.fits for row in trials))
    what = f"samples per GPU, in {steps}; {best.split.global_batch_size} behind each optimizer step"
    each = [
        tile("What to set", shares_of(best.split), what),
        tile("Speed", f"{rate_of(best)} samples/s", _speed_beside(best, even, kind)),
        _how_sure(best, even, tried, is_modelled=config.is_modelled),
    ]
    if best.memory:
        fullest = min(best.memory, key=lambda memory: memory.headroom_bytes)
        demanded = format_bytes(config.min_headroom_bytes[fullest.device])
        each.append(tile("Room left", format_bytes(fullest.headroom_bytes),
                         f"on GPU {fullest.device}, the fullest; {demanded} must stay free"))  # fmt: skip
    wrap = "config.wrap(model, loss_fn)" if config.loss_placement == "replica" else "config.wrap(model)"
    code = f'config = splittune.SplitConfig.load("split.json")\nmodel = {wrap}'
    if config.strategy == "ddp":
        code += "  # in each rank\nloader = config.shard(loader)"
    do = section("Train with it", tag("pre", tag("code", code)), class_="do",
                 sentence="The config lies beside this page:")  # fmt: skip
    return tag("header", headline(kicker, _headline(found), _lead(found), kind), tiles(each), do)


def _kind(config: SplitConfig) -> str:
    return "modelled" if config.is_modelled else "measured"


def search_answer(files: SearchFiles) -> tuple[str, str]:
    """The answer in large words, and in a sentence or two."""
    if files.found is None:
        return "No split fits", f"{count_of(len(files.trials), 'trial')} ended, and none fitted."
    return _headline(files.found), f"{_lead(files.found)} ({'modelled' if files.is_modelled else 'measured'})"


def _lead(found: Found) -> str:
    best, even = found.best, found.baseline
    steps = count_of(best.split.accumulation_steps, "accumulation step")
    even_text = "where no even split fits"
    if even is not None:
        is_even = even.split == best.split
        even_text = (
            "evenly spread" if is_even else f"where the even split, {shape_of(even.split)}, gives {rate_of(even)}"
        )
    return (
        f"Train with {steps}, and give the GPUs {shares_of(best.split)} samples of each micro-batch: {rate_of(best)} "
        f"samples a second, {even_text}. Your batch of {best.split.global_batch_size} stays as it is."
    )


def _headline(found: Found) -> str:
    speedup = speedup_over(found.baseline, found.best)
    if found.baseline is None or speedup is None:
        return "It fits, where no even split does"
    if (found.best.split, found.best.loss_placement) == (found.baseline.split, found.baseline.loss_placement):
        return "Keep the even split: none is faster"
    if speedup < LEAST_SPEEDUP:
        return "As fast as the even split"
    return f"{speedup:.2f} times as fast, at the same batch size"


def _speed_beside(best: Measurement, even: Measurement | None, kind: str) -> str:
    step = "" if best.step_time_s is None else f", {format_time(best.step_time_s)} a step"
    return f"{kind}{step}; the even split: {'does not fit' if even is None else rate_of(even)}"


def _how_sure(best: Measurement, even: Measurement | None, tried: str, *, is_modelled: bool) -> Markup:
    if is_modelled:
        return tile("How sure", "Modelled", f"such times were off by {MEDIAN_TIME_ERROR:.0%} in the median; {tried}")
    error = best.relative_error
    if error is None:
        return tile("How sure", "Measured", tried)
    speedup = speedup_over(even, best)
    if speedup is None or even is None or even.relative_error is None or even.split == best.split:
        return tile("How sure", f"± {error:.1%}", f"95 % interval of the step time; {tried}")
    both = speedup * hypot(error, even.relative_error)
    return tile("How sure", f"{speedup:.2f} ± {max(both, 0.005):.2f}", f"times the even split, 95 % interval; {tried}")


def _why(found: Found) -> Markup:
    more = f"For more: {found.remedy}." if found.remedy else ""
    said = [text for text in (*found.facts, *found.notes, more, found.foretold) if text]
    whole = tag("details", tag("summary", "The whole explanation"), tag("p", found.explanation))
    return section("Why", *(tag("p", text) for text in said), whole, class_="why")


def _how_memory_is_known(is_modelled: bool) -> str:
    if is_modelled:
        source = "Peaks, the allocator's reserve and what others hold are accounted on virtual cards"
    else:
        source = "Peaks and the allocator's reserve are measured by torch, what others hold by NVML"
    return (
        f"{source}; parameters are a size of the model, and so is the most that gradients are. The optimizer's state "
        "is derived from what rests on a card between steps; activations, outputs and the rest from how peaks grow "
        "with the shares and with the micro-batch, over all trials."
    )


def _step_times(trials: Sequence[TrialRow], cards: Sequence[BusyRow], config: SplitConfig) -> StepTimes | None:
    """Those of the last trial of the config's split whose parts were timed; None where there is none."""
    shape = (config.split.accumulation_steps, config.split.shard_sizes, config.loss_placement)
    for row in reversed(trials):
        if row.shape != shape or not row.micro_step_time_s or row.update_time_s is None:
            continue
        busy = {card.device: card.busy_s for card in cards if card.trial == row.number}
        copied = {card.device: card.copied_s for card in cards if card.trial == row.number}
        known = [busy.get(device.index) for device in config.devices]
        copies = [copied.get(device.index) for device in config.devices]
        if all(each is not None for each in known):
            return StepTimes(
                accumulation_steps=row.accumulation_steps,
                micro_step_s=row.micro_step_time_s,
                update_s=row.update_time_s,
                busy_s=tuple(each or 0.0 for each in known),
                copied_s=None if None in copies else tuple(each or 0.0 for each in copies),
                device_names=tuple(device.name for device in config.devices),
                is_in_ranks=config.strategy == "ddp",
            )
    return None


def _why_stopped(stopped: str) -> str:
    if stopped in CUT_SHORT:
        said = CUT_SHORT[stopped]
        return f"{said[0].upper()}{said[1:]}"
    return WHY_STOPPED.get(stopped, "")


def _names(config: SplitConfig) -> str:
    names: dict[str, list[int]] = {}
    for device in config.devices:
        names.setdefault(device.name, []).append(device.index)
    return ", ".join(f"{len(places)} x {cut(name, 60)}" for name, places in names.items())


def _footer(config: SplitConfig) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(config.versions.items()))
    return [describe_model_error() if config.is_modelled else "", f"Written by splittune. Tuned with {versions}."]
