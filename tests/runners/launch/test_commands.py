"""Commands on ranks: what is refused, and on whom it is blamed; and verify, each rank's card beside its plan."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from splittune import ConfigError, SplitConfig
from splittune.runners.launch.place import place_of
from splittune.split import BatchSplit
from tests.cli.command_line import Run
from tests.ranks.cases import config_of
from tests.runners.launch.standin import launch

TWO = "1xT400-4GB,1xRTX3090"
TUNE = ["tune", "job.py:make_task", "--devices", TWO, "--strategy", "ddp", "--max-trials", "2"]
JOB = """
import os, torch
from torch import nn
from splittune import TrainingTask

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))

class Model(nn.Linear):
    most = 10**9

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 1 MB")
        return super().forward(x)

def make_task():
    torch.manual_seed(0)
    return TrainingTask(Model(4, 1), [(torch.randn(8, 4), torch.randn(8, 1)), (torch.randn(5, 4), torch.randn(5, 1))])

def too_large_for_rank_1():
    task = make_task()
    task.model.most = 10**9 if RANK == 0 else 2
    return task

def unlike():
    torch.manual_seed(0)
    return TrainingTask(nn.Linear(4, 1, bias=RANK == 0), [(torch.randn(8, 4), torch.randn(8, 1))])

def raises_on_rank_1():
    if RANK == 1:
        raise KeyError("labels")
    return make_task()
"""


def config(shares: tuple[int, ...] = (3, 5)) -> SplitConfig:
    split = BatchSplit(global_batch_size=sum(shares), accumulation_steps=1, shard_sizes=shares)
    return dataclasses.replace(config_of(2, split=split), virtual_spec=TWO)


def without_job() -> None:
    """The second machine's folder lacks the file."""
    if os.environ["RANK"] == "1":
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")


def where_nothing_can_be_written() -> None:
    """The second machine's folder has the job, and a file where the others have the folder of the results."""
    if os.environ["RANK"] == "1":
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")
        Path("job.py").write_text(JOB)
        Path("runs").write_text("")


def no_trap() -> None: ...


@pytest.mark.parametrize(
    ("job", "prepare", "words"),
    [
        ("make_task", without_job, "rank 1: there is no file 'job.py'"),
        ("unlike", no_trap, "the ranks differ in the model"),
        ("raises_on_rank_1", no_trap, "rank 1: job.py:raises_on_rank_1 raised KeyError: 'labels'"),
    ],
)
def test_ranks_that_cannot_begin_are_named_before_the_first_trial(tmp_path, job, prepare, words) -> None:
    """All exit alike, nothing is started again, and rank 0 says what is wrong where."""
    (tmp_path / "job.py").write_text(JOB)
    launched = launch([*TUNE[:1], f"job.py:{job}", *TUNE[2:]], tmp_path, prepare=prepare)
    assert (launched.code, launched.codes) == (2, [[0, 0]])
    assert words in launched.log
    assert "trial" not in launched.log.split("splittune:")[0]


def test_another_number_of_ranks_than_cards_is_refused(tmp_path: Path) -> None:
    """Two ranks for three cards."""
    (tmp_path / "job.py").write_text(JOB)
    launched = launch([*TUNE[:3], "3xRTX3090", *TUNE[4:]], tmp_path)
    assert (launched.code, launched.codes) == (2, [[0, 0]])
    assert "devices names 3 cards, and the process group has 2 ranks" in launched.log


def test_only_rank_0_has_to_write(tmp_path: Path) -> None:
    """Where it cannot, that is said before the first trial; the others need no folder."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "file").write_text("")
    launched = launch([*TUNE, "--out", "file/made"], tmp_path)
    assert (launched.code, launched.codes) == (2, [[0, 0]])
    assert "rank 0: cannot write file/made" in launched.log


def test_a_machine_that_cannot_write_takes_part(tmp_path: Path) -> None:
    """Rank 0 decides: where it can write the results are, and nothing is looked for or made elsewhere."""
    (tmp_path / "job.py").write_text(JOB)
    launched = launch(TUNE, tmp_path, prepare=where_nothing_can_be_written)
    assert (launched.code, launched.codes) == (0, [[0, 0]]), launched.log
    assert SplitConfig.load(tmp_path / "runs/split/split.json").split.num_devices == 2
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir() if path.is_file()) == ["job.py", "runs"]


def test_rank_0_alone_speaks_and_says_each_thing_once(tmp_path: Path) -> None:
    """What is inferred of the job, whatever copies of it are run; the others' cards find the same."""
    (tmp_path / "job.py").write_text(JOB)
    launched = launch(TUNE, tmp_path)
    assert launched.code == 0, launched.log
    for words in ("no optimizer was given", "no loss_fn was given", "samples a step: at most", "Saved in runs/split"):
        assert launched.log.count(words) == 1, launched.log


def test_verify_trains_on_all_ranks(tmp_path: Path) -> None:
    """Each card stands beside its plan, and the loss is that of the whole batch."""
    (tmp_path / "job.py").write_text(JOB)
    config().save(tmp_path / "split.json")
    launched = launch(["verify", "split.json", "job.py:make_task", "--steps", "4"], tmp_path)
    assert (launched.code, launched.codes) == (0, [[0, 0]]), launched.log
    assert "GPU 0  T400-4GB" in launched.log
    assert "GPU 1  RTX3090" in launched.log
    assert "Verified: 4 steps and" in launched.log


def test_verify_names_the_rank_that_lacks_memory(tmp_path: Path) -> None:
    """The others do not wait for it: it leaves the group of the steps, and all say the same."""
    (tmp_path / "job.py").write_text(JOB)
    config().save(tmp_path / "split.json")
    launched = launch(["verify", "split.json", "job.py:too_large_for_rank_1", "--steps", "4"], tmp_path)
    assert (launched.code, launched.codes) == (1, [[0, 0]]), launched.log
    assert "Not verified: out of memory at step 1, on GPU 1" in launched.log


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, ["--strategy", "dp"], "--strategy is dp: expected ddp"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ["--strategy", "ddp", "--isolation", "process"], "expected one launcher"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["--strategy", "ddp"], "RANK='x' and WORLD_SIZE='4': expected two whole"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["--strategy", "ddp"], "expected a rank from 0 to 3"),
    ],
)
def test_what_does_not_go_with_a_launcher_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: list[str], words: str
) -> None:
    """Before anything is started or waited for."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = run("tune", "job.py:make_task", "--devices", TWO, *options)
    assert ended.code == 2
    assert words in ended.err


@pytest.mark.parametrize("environment", [{}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_verify_on_ranks_measures_no_evaluation_batch_size(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """It says why, and which batches a rank can evaluate; before anything is started or waited for."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = config().save(tmp_path / "split.json").read_bytes()
    ended = run("verify", "split.json", "job.py:make_task", "--eval-batch-size")
    assert ended.code == 2
    said = " ".join(ended.err.split())
    assert "a batch that one process shares out among its cards, and a rank evaluates batches of its own" in said
    assert "evaluate up to 3+5 samples at once, rank by rank" in said
    assert (tmp_path / "split.json").read_bytes() == before


def test_a_process_by_itself_has_no_place() -> None:
    """And one of a launch has that of its environment."""
    assert place_of({}) is None
    place = place_of({"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place is not None
    assert (place.rank, place.world_size, place.num_starts, place.is_first, place.folder) == (1, 4, 2, False, None)
    with pytest.raises(ConfigError, match="or neither"):
        place_of({"RANK": "1"})
