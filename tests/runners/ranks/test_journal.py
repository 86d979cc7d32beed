"""The note of the trial on its way: there while it runs, and after what ended the process in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from splittune.errors import ConfigError, RanksError
from splittune.runners.ranks.journal import TrialJournal

TRIAL = {"phase": "a split", "shares": [3, 5]}


def test_a_trial_that_ends_leaves_no_note(tmp_path: Path) -> None:
    """By its end, or by an exception of the user's: neither has lost a rank."""
    journal = TrialJournal(tmp_path / "deep" / "trial")
    with journal.running(TRIAL):
        assert TrialJournal(journal.path).num_crashes(TRIAL) == 1  # as one would find it that starts now
    journal = TrialJournal(tmp_path / "other")
    with pytest.raises(LookupError), journal.running(TRIAL):
        raise LookupError
    assert TrialJournal(journal.path).num_crashes(TRIAL) == 0


def test_a_trial_that_lost_ranks_is_counted_each_time(tmp_path: Path) -> None:
    """Of this trial alone, across restarts, until the search has ended."""
    for number in range(3):
        journal = TrialJournal(tmp_path / "trial")
        assert journal.num_crashes(TRIAL) == number
        with pytest.raises(RanksError), journal.running(TRIAL):
            raise RanksError
    assert TrialJournal(tmp_path / "trial").num_crashes(TRIAL | {"shares": [4, 4]}) == 0
    journal.remove()
    assert TrialJournal(tmp_path / "trial").num_crashes(TRIAL) == 0


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "splittune plan 2"}', b"[]", b"\xff"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """And left as it is."""
    path = tmp_path / "trial"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no journal of a trial"):
        TrialJournal(path)
    assert path.read_bytes() == content
