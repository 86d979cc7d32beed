"""What ranks answered, kept in a file of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.ranks.memo import AnswerMemo
from splittune.runners.ranks.orders import Answer
from splittune.split import BatchSplit

SPLIT = BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(4,))
MEASURED = Measurement(split=SPLIT, outcome=Outcome.OK, micro_step_times_s=(0.1,), update_times_s=(1 / 3,))
ANSWERS = [Answer(measurement=MEASURED, needs_values="a loss is read"), Answer(scripts_hold=False)]


def test_answers_are_read_back_equal(tmp_path: Path) -> None:
    """Those of this search alone; a last line that was cut short costs itself."""
    path = tmp_path / "deep" / "trials"
    memo = AnswerMemo(path, "one job")
    with memo.alone():
        memo.add({"shares": [4, None]}, ANSWERS)
        memo.add({"shares": [5, None]}, ANSWERS)
    path.write_bytes(path.read_bytes()[:-20])
    other = AnswerMemo(path, "another job")
    with other.alone():
        assert other.get({"shares": [4, None]}) is None
        other.add({"shares": [4, None]}, ANSWERS[1:])
    memo = AnswerMemo(path, "one job")
    with memo.alone():
        assert memo.get({"shares": [4, None]}) == ANSWERS
        assert memo.get({"shares": [5, None]}) is None


def test_two_searches_at_once_are_refused(tmp_path: Path) -> None:
    """Of one job; both would write in turn."""
    with AnswerMemo(tmp_path / "trials", "one job").alone():
        second = AnswerMemo(tmp_path / "trials", "one job")
        with pytest.raises(ConfigError, match="another splittune is using"), second.alone():
            pass


@pytest.mark.parametrize("content", [b'{"op_code": 0}\n', b"SQLite format 3\x00", b"[1]\n"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """And left as it is."""
    path = tmp_path / "trials"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no trials of ranks on virtual cards"), AnswerMemo(path, "a").alone():
        pass
    assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="expected the path of a file"):
        AnswerMemo("sqlite:///trials.db", "a")
