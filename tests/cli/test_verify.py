"""verify: what it trains, what it says, and the code it exits with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from splittune import SplitConfig
from splittune.hardware import resolve_hardware
from splittune.split import BatchSplit
from splittune.units import GIB, MIB
from tests.cli.command_line import CARDS, Run


def save_split(path: Path, devices: str = CARDS[1], **fields: Any) -> Path:
    """What tune would have written for the job's batches of 8."""
    hardware = resolve_hardware(devices)
    return SplitConfig(
        split=BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3)),
        devices=hardware.devices,
        virtual_spec=hardware.spec,
        is_modelled=True,
        **{"min_headroom_bytes": (0, 0), "planned_peak_reserved_bytes": (MIB * 2, MIB * 2), **fields},
    ).save(path)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return save_split(tmp_path / "split.json")


def test_verify_trains_and_compares(run: Run, split: Path) -> None:
    """verify exits with 0 where all went as planned, says so in its last line, and changes no file."""
    before = split.read_bytes()
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "6")
    assert (ended.code, ended.err) == (0, "")
    assert re.search(r"GPU 0-1 +RTX3090 .* as planned", ended.out)
    assert re.search(r"^step 6  loss \d", ended.out, re.MULTILINE)
    assert ended.out.splitlines()[-1] == "Verified: 6 steps and 4 evaluations ran, and every device kept its headroom."
    assert split.read_bytes() == before
    quiet = run("verify", "split.json", "job.py:make_task", "--steps", "6", "--quiet")
    assert quiet.code == 0
    assert not re.search(r"^(step|reading|no optimizer)", quiet.out, re.MULTILINE)


def test_verify_takes_what_tune_wrote(run: Run, tmp_path: Path) -> None:
    """A split that was tuned is verified on its devices, and on others with a note."""
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "out").code == 0
    assert run("verify", "out/split.json", "job.py:make_task", "--steps", "5").code == 0
    elsewhere = run("verify", "out/split.json", "job.py:make_task", "--steps", "5", "--devices", "2xV100-16GB")
    assert elsewhere.code == 0
    assert "tuned on other devices than these" in elsewhere.out
    assert "Warning" not in elsewhere.out + elsewhere.err


def test_verify_keeps_the_evaluation_batch_size_on_request(run: Run, split: Path) -> None:
    """--eval-batch-size measures it, prints it, and writes it into the file, which then says a newer schema."""
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "2", "--eval-batch-size")
    assert ended.code == 0
    assert "Written to split.json: eval_batch_size 256." in ended.out
    assert SplitConfig.load(split).eval_batch_size == 256
    assert "Evaluation batches of 256 samples" in run("verify", "split.json", "job.py:make_task", "--steps", "1").out


def test_verify_exits_with_1_where_memory_runs_out(run: Run, tmp_path: Path) -> None:
    """Out of memory: which step, which device, and what to do."""
    save_split(tmp_path / "split.json", "2xT400-4GB:occupied=3800MiB")
    ended = run("verify", "split.json", "job.py:too_large", "--eval-batch-size")
    assert ended.code == 1
    said = " ".join(ended.out.split())
    assert re.search(r"CUDA out of memory\..*Not verified: out of memory at step 1, on GPU 1\. Tune again with", said)
    assert re.search(r"or more kept free \(--min-headroom-bytes \d+\)\.$", said)
    assert SplitConfig.load(tmp_path / "split.json").eval_batch_size is None


def test_verify_exits_with_1_where_headroom_is_not_kept(run: Run, tmp_path: Path) -> None:
    """Too little headroom: what is lacking on which device; tune takes what it advises."""
    save_split(tmp_path / "split.json", min_headroom_bytes=(0, 24 * GIB))
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "2")
    assert ended.code == 1
    assert "Not verified: GPU 1 lacks" in ended.out
    advised = ("--min-headroom-bytes", str(3 * GIB))
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "1", *advised, "--out", "out").code == 0
    assert SplitConfig.load(tmp_path / "out/split.json").min_headroom_bytes == (3 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["split.json", "job.py:batches_of_6"],
            r"tuned for batches of 8 samples .* gives batches of 6.*or tune this job",
        ),
        ([".", "job.py:make_task"], r"cannot read \.:.*This is a folder: name the file in it"),
        (["cut.json", "job.py:make_task"], r"cut.json: this is no complete JSON.*tune again"),
        (["none.json", "job.py:make_task"], r"cannot read none.json.*Is the path right"),
        (["split.json", "nowhere.py:make_task"], r"there is no file 'nowhere.py'.*Check the path"),
        (["split.json", "job.py:make_task", "--devices", "3xRTX3090"], r"got 3 .*expected 2"),
    ],
)
def test_a_mistake_in_verifying_exits_with_2(arguments: list[str], match: str, run: Run, split: Path) -> None:
    """What cannot be used is refused in one message on standard error, which says what to do."""
    split.with_name("cut.json").write_text(split.read_text()[:200])
    ended = run("verify", *arguments)
    assert ended.code == 2
    assert re.search(match, ended.error, re.DOTALL)
    assert ended.error.count("\n") == 1
    assert run("verify", "split.json", "job.py:make_task", "--steps", "0").code == 2


def test_verifying_a_job_whose_function_raises_exits_with_3(run: Run, split: Path) -> None:
    """As tuning it does."""
    ended = run("verify", str(split), "job.py:raises")
    assert ended.code == 3
    assert "job.py:raises raised ZeroDivisionError" in ended.error


def test_verify_ends_early_as_tune_does(run: Run, split: Path) -> None:
    """The job's own exception exits with 3 and its traceback, Ctrl-C with 130, SIGTERM with 143."""
    buggy = run("verify", "split.json", "job.py:buggy")
    assert buggy.code == 3
    assert "ZeroDivisionError: a bug of the user's own" in buggy.err
    interrupted = run("verify", "split.json", "job.py:interrupted")
    assert interrupted.code == 130
    assert "Interrupted; the model is as it was." in interrupted.out
    assert run("verify", "split.json", "job.py:terminated").code == 143
