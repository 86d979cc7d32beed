"""The benchmark for a card runs, part by part, on a virtual GPU; its own arithmetic is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import limits as gpu_limits
from benchmarks.gpu import memory as gpu_memory
from benchmarks.gpu import model_errors as gpu_model_errors
from benchmarks.gpu import neighbour as gpu_neighbour
from benchmarks.gpu import ooms as gpu_ooms
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import replicas as gpu_replicas
from benchmarks.gpu import run as gpu
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu import truth as gpu_truth
from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.readings import Trace, Window, blocks_held, sampled, traced
from benchmarks.gpu.stage import Findings, Stage, useful_splits
from benchmarks.jobs.gpu_models import tuned_job
from benchmarks.jobs.zoo import ZOO
from benchmarks.peers.finders import accelerate_executable
from splittune.hardware import resolve_hardware
from splittune.profiling import watch
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.foretell import foretell
from splittune.split import BatchSplit
from splittune.training import read_batches
from splittune.units import MIB
from tests.processes import DEADLINE_S

DEVICE = "1xT400-4GB"
CARD = torch.device("cuda", 0)


@pytest.fixture
def stage() -> Stage:
    """A rehearsal of fewer samples than the command's own."""
    stage = Stage(DEVICE, quiet=True)
    stage.sizes = replace(stage.sizes, gpt_context=512, tuned_batch=8, greedy_width=1024)
    return stage


def found_by(part: Callable[..., None], stage: Stage, **options: object) -> Findings:
    findings = Findings(part="part")
    part(stage, findings, **options)
    return findings


def window(phase: str, begin_us: float, end_us: float) -> Window:
    return Window(phase=phase, begin_us=begin_us, end_us=end_us, duration_s=1.0)


def event(action: str, size: int, time_us: int) -> dict[str, object]:
    return {"action": action, "size": size, "time_us": time_us}


def test_a_traces_peaks_are_those_of_each_window():
    """Blocks count rounded from their request to their being freed, segments as they are; between
    windows all goes on."""
    events = [
        event("segment_alloc", 2 * MIB, 10),
        event("alloc", 1000, 11),
        event("alloc", 512, 12),
        event("free_requested", 1000, 13),
        event("free_completed", 1000, 14),
        event("segment_alloc", 20 * MIB, 25),  # between the windows
        event("alloc", 1, 31),
        event("segment_free", 2 * MIB, 32),
    ]
    trace = Trace(events=events, allocated_before_bytes=100, reserved_before_bytes=MIB)
    windows = [window("warm_up", 9, 20), window("update", 30, 40)]
    assert trace.covers(windows)
    first, second = trace.peaks(windows)
    assert (first.allocated_bytes, first.reserved_bytes) == (100 + 1024 + 512, 3 * MIB)
    assert (second.allocated_bytes, second.reserved_bytes) == (100 + 512 + 512, 23 * MIB)


def test_a_trace_by_another_clock_tells_nothing():
    """Where no event lies within the trial, the trace says so instead of agreeing with anything."""
    trace = Trace(events=[event("alloc", 512, 5)])
    assert not trace.covers([window("warm_up", 1000, 2000)])
    assert "clocks differ" in trace.problem


def test_a_card_is_traced_and_sampled_by_public_and_private_calls(monkeypatch):
    """What torch's calls answer on a card is what the readings hold; an earlier recording's events are left out."""
    calls, now_us, has_sampled = [], time.time_ns() // 1000, threading.Event()
    events = [event("alloc", 4096, now_us - 10**7), event("alloc", 512, now_us + 10**7)]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: has_sampled.set() or (6 * MIB, 10 * MIB))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: calls.append(args))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [events]})
    with sampled(CARD, every_s=0.001) as samples, traced(CARD) as trace:
        assert has_sampled.wait(DEADLINE_S)
    assert [call["size"] for call in trace.events] == [512]
    assert (trace.allocated_before_bytes, trace.reserved_before_bytes, trace.problem) == (100, 2 * MIB, "")
    assert calls == [("all",), (None,)]
    assert (samples.most_used_bytes, samples.typical_outside_bytes) == (4 * MIB, 2 * MIB)
    assert samples.least_free_bytes == 6 * MIB


def test_a_torch_that_records_nothing_is_no_error(monkeypatch):
    """Recording is private to torch: without it the trace is empty and says why."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    with traced(CARD) as trace:
        pass
    assert "records no history" in trace.problem
    assert not trace.covers([window("warm_up", 0, 1)])


def test_a_snapshots_blocks_and_segments_are_added_up(monkeypatch):
    """Live blocks alone count as held, segments wholly, and those of other cards not at all."""
    blocks = [{"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]
    segments = [
        {"device": 0, "total_size": 2 * MIB, "blocks": blocks},
        {"device": 1, "total_size": MIB, "blocks": blocks},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert blocks_held(CARD) == (512, 2 * MIB)
    assert blocks_held(torch.device("cpu")) is None


def test_useful_splits_have_every_size_once_at_its_fewest_steps():
    """Of 8 samples on one card: 8, 4, 3, 2 and 1 at a time."""
    splits = useful_splits(8)
    assert [(split.accumulation_steps, split.micro_batch_size) for split in splits] == [
        (1, 8),
        (2, 4),
        (3, 3),
        (4, 2),
        (8, 1),
    ]


def test_every_phase_runs_out_of_memory_and_recovers(stage):
    """Forward, backward, first state and a later update, each in its own phase, with nothing left behind."""
    findings = found_by(gpu_ooms.run, stage)
    assert [row["failed_in"] for row in findings.rows] == list(gpu_ooms.PHASES)
    assert not findings.failures


def test_what_is_emitted_under_a_limit_fits(stage):
    """The search under a limit emits what fits, and the next faster split is tried."""
    findings = found_by(gpu_limits.run, stage, num_limits=1)
    (row,) = findings.rows
    assert row["fits"]
    assert row["next_outcome"] in ("out_of_memory", "no_headroom", "none is faster")
    assert row["in_brief"].startswith("search 8x1 ok ")


def test_what_lacks_headroom_in_whole_steps_alone_is_no_loss(stage):
    """Short trials of every larger size keep it: complete steps are believed, up to the first that lacks it."""
    task = tuned_job(stage.sizes, stage.seed)()
    every = gpu_limits.measure_every(stage.hardware, task)
    splits = sorted(every, key=lambda split: split.micro_batch_size)
    slow, lacking = every[splits[0]], splits[1]

    def measured(split: BatchSplit) -> Measurement:
        return replace(every[split], outcome=Outcome.NO_HEADROOM if split == lacking else Outcome.OK)

    job = SimpleNamespace(profiler=SimpleNamespace(measure_whole_steps=measured))
    row = gpu_limits._next_of(every, slow, job)
    assert (row["next_steps"], row["next_outcome"]) == (lacking.accumulation_steps, "no_headroom")
    assert row["regret"] == 0

    lacking = splits[2]
    row = gpu_limits._next_of(every, slow, job)
    assert row["next_steps"] == splits[1].accumulation_steps
    assert row["regret"] == pytest.approx(1 - slow.throughput / every[splits[1]].throughput)


def test_a_neighbour_that_grows_is_told(stage, monkeypatch):
    """Memory that goes in mid-trial has the trial measured again, and the winner fits beside it."""
    monkeypatch.setattr(watch, "OUTSIDE_TOLERANCE_BYTES", 8 * MIB)
    monkeypatch.setattr(gpu_neighbour, "DRIVER_BYTES", 8 * MIB)
    findings = found_by(gpu_neighbour.run, stage)
    assert findings.rows[0]["is_repeated"]
    assert not findings.failures


def test_peaks_and_times_are_foretold(stage):
    """A row for each trial, with an interval for all but the first of a job and with a time, and a
    summary that fails nothing in a rehearsal."""
    findings = found_by(gpu_model_errors.run, stage, names=["MLP"])
    assert len(findings.rows) == 4 * len(gpu_model_errors.STEPS)
    foretold = [row for row in findings.rows if row["num_known"]]
    assert len(foretold) == 4 * (len(gpu_model_errors.STEPS) - 1)
    assert all(row["least_mib"] <= row["foretold_mib"] <= row["most_mib"] for row in foretold)
    assert all(row["resting_mib"] <= row["peak_allocated_mib"] <= row["peak_reserved_mib"] for row in findings.rows)
    assert all(row["time_error"] is not None for row in findings.rows if row["is_whole_batch"])
    assert not findings.failures


def test_jobs_differ_most_in_the_beginning():
    """Each model comes once before any comes again, and only those with blocks are checkpointed."""
    jobs = list(gpu_model_errors.jobs(["MLP", "CNN", "ViT", "GPT"]))
    assert len(jobs) == len(set(jobs)) == 24
    assert [job[0] for job in jobs[:4]] == ["MLP", "CNN", "ViT", "GPT"]
    assert {job[0] for job in jobs if job[3]} == {"ViT", "GPT"}


def test_a_part_that_has_no_time_left_says_what_it_leaves_out(stage):
    """On a card, jobs that would not end in time are not begun."""
    stage.is_rehearsal, stage.ends_at_s = False, 0.0
    findings = found_by(gpu_model_errors.run, stage)
    assert findings.cut_short == "24 of 24 jobs, from MLP fp32 SGD on"


def test_other_tools_are_run_beside_ours(stage):
    """Every split, ours and a peer's answer are measured alike, with OOMs and seconds."""
    pytest.importorskip("accelerate")
    findings = found_by(gpu_peers.run, stage, peers=[accelerate_executable])
    assert [row["strategy"] for row in findings.rows] == ["every split", "splittune", "Accelerate"]
    assert all(row["search_s"] > 0 and row["samples_per_s"] > 0 for row in findings.rows)
    assert findings.rows[2]["num_ooms"] > 0


def test_busy_times_and_first_steps_are_read(stage):
    """Busy time is within the step's; a virtual GPU's kernels cannot be added up."""
    findings = found_by(gpu_timing.run, stage)
    busy = [row for row in findings.rows if row["figure"] == "busy"]
    assert all(0 < row["busy_s"] <= row["step_s"] for row in busy)
    assert not findings.failures


def test_both_engines_run_over_one_device_named_three_times(stage):
    """A row for each engine; what only a card can show is not told, and not failed."""
    findings = found_by(gpu_replicas.run, stage)
    assert [row["engine"] for row in findings.rows] == ["window", "torch"]
    assert all(row["host_ms"] > 0 for row in findings.rows)
    assert [check.passed for check in findings.checks] == [None] * 4


def test_a_worker_that_is_spoilt_or_killed_is_a_crashed_trial(stage):
    """The search goes on after the one, and the other's memory is looked for."""
    findings = found_by(gpu_worker.run, stage)
    assert [row["outcomes"] for row in findings.rows] == ["ok, ok, crashed, ok", "ok, crashed"]
    assert not findings.failures


def test_models_stand_beside_what_a_plan_foretells(stage):
    """A row for each split, and no error where virtual cards are compared with themselves."""
    findings = found_by(gpu_truth.run, stage)
    assert [(row["model"], row["accumulation_steps"]) for row in findings.rows] == [
        (name, steps) for name in ("MLP", "GPT") for steps in gpu_truth.STEPS
    ]
    assert [row["step_time_error"] for row in findings.rows] == pytest.approx([0.0] * 4, abs=1e-9)
    assert {row["peak_reserved_error"] for row in findings.rows} == {0.0}
    assert [check.passed for check in findings.checks] == [None] * 5
    assert [check.detail for check in findings.checks[3:]] == ["4 of 4", "0 of 0"]
    assert findings.checks[0].detail == "median 0.0%, 90th percentile 0.0%"


def test_a_model_that_fails_and_a_library_that_is_missing_cost_no_other_row(stage):
    """The one has a row with its reason, the other's models are named and left out."""
    good, other = gpu_truth.tiny(stage)
    models = [
        replace(other, name="broken", make=lambda: (_ for _ in ()).throw(LookupError("no such layer"))),
        replace(other, name="elsewhere", library="no_such_library"),
        good,
    ]
    findings = found_by(gpu_truth.run, stage, models=models)
    assert [row["model"] for row in findings.rows] == ["broken", "MLP", "MLP"]
    assert findings.rows[0]["why"] == "LookupError: no such layer"
    details = [check.detail for check in findings.checks]
    assert details[0] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert details[-1] == "not broken: their rows say why"
    assert not findings.failures


def test_models_that_have_no_time_left_are_named(stage):
    """On a card, one that would not end in time is not begun."""
    models = gpu_truth.tiny(stage)
    stage.is_rehearsal, stage.ends_at_s = False, 0.0
    findings = found_by(gpu_truth.run, stage, models=models)
    assert findings.cut_short == "2 of 2 models, from MLP on"


def test_errors_are_told_by_their_size():
    """Too much and too little count alike; a split that did not run has none."""
    rows = [{"step_time_error": error} for error in (-0.1, 0.0, 0.1, 0.3, None)] + [{"why": "broken"}]
    assert gpu_truth.errors_of(rows, "step_time") == pytest.approx((0.1, 0.24))
    assert gpu_truth.errors_of(rows[:1], "step_time") is None


def test_twenty_models_are_named_and_made_without_weights():
    """Twelve of timm and eight of transformers, each once."""
    assert len({model.name for model in ZOO}) == 20
    assert [sum(model.library == name for model in ZOO) for name in ("timm", "transformers")] == [12, 8]


def test_a_model_of_transformers_is_made_and_foretold():
    """From its configuration alone, on a card that is not here."""
    pytest.importorskip("transformers")
    (model,) = (each for each in ZOO if each.name == "segformer-b0")
    task = model.task(2, seed=0)
    split = BatchSplit(global_batch_size=2, accumulation_steps=1, shard_sizes=(2,))
    foretold = foretell(
        task, read_batches(task.loader), resolve_hardware("1xH100-80GB"), [(split, "output")], budget_s=300.0
    )
    assert foretold.why == ""
    assert foretold.planned[0].throughput > 0


def breaks(_stage: Stage, findings: Findings) -> None:
    findings.rows.append({"figure": 1})
    raise RuntimeError("boom")


def runs(_stage: Stage, findings: Findings) -> None:
    findings.check("it runs", True, "yes")


def spoils(_stage: Stage, _findings: Findings) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def parts_of(*functions: Callable[[Stage, Findings], None]) -> list[gpu.Part]:
    return [gpu.Part(name=run.__name__, title="", run=run, share_s=1) for run in functions]


def test_a_part_that_breaks_off_is_a_failure_and_the_others_go_on(stage, tmp_path):
    """Its rows so far are written, with what they were measured on."""
    found = gpu.run_parts(stage, parts_of(breaks, runs), 60.0, tmp_path)
    assert [[check.passed for check in findings.checks] for findings in found] == [[False], [True]]
    assert gpu.summarise(stage, found) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_breaks.csv"]
    header = (tmp_path / "gpu_breaks.csv").read_text().splitlines()[0]
    assert header == "figure,card,driver,cuda,splittune,torch,python,seed,is_modelled"


def test_after_an_error_that_spoils_the_card_nothing_is_begun(stage):
    """The parts after it are left out, and say why."""
    found = gpu.run_parts(stage, parts_of(spoils, runs), 60.0, None)
    assert "spoilt the card" in found[1].cut_short
    assert not found[1].checks


def test_the_command_rehearses_and_writes_nothing(tmp_path: Path, capsys, monkeypatch):
    """Every line of a rehearsal says modelled; what a virtual GPU has no second reading of is not
    told, and not failed."""
    monkeypatch.setattr(gpu_memory, "JOBS", gpu_memory.JOBS[:1])
    code = gpu.main(["--devices", DEVICE, "--only", "memory", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert all(line.startswith("[modelled]") for line in lines)
    assert sum("passed    memory: GPT at" in line for line in lines) == 2
    assert any("not told  memory: GPT at 4 steps" in line for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "memory,nothing", "--devices", DEVICE], "there is no part nothing: expected memory, "),
        (["--devices", "2xT400-4GB"], "has 2 devices: expected one"),
        (["--devices", "1xNothing"], "Nothing"),
        pytest.param(
            [],
            "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, complaint, capsys):
    """An unknown part, or no card: exit code 2 and a reason."""
    with pytest.raises(SystemExit, match="2"):
        gpu.main(arguments)
    assert complaint in " ".join(capsys.readouterr().err.split())
