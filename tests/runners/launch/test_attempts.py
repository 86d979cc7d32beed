"""What a launch knows of the ends of its ranks, and when it has had enough of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from splittune import WorkerError
from splittune.runners.launch import agent
from splittune.runners.launch.attempts import EXIT_TOO_LONG, Attempts, NotingJournal


def test_the_last_end_is_told_in_words(tmp_path: Path) -> None:
    """A signal with its meaning, a limit by its option's name, an exception as the rank itself said it."""
    attempts = Attempts(tmp_path)
    assert attempts.last_end("--limit") == ""
    attempts.note_end(1, -9)
    assert attempts.last_end("--limit").startswith("rank 1 ended with signal 9 (SIGKILL): likely the host's")
    attempts.note_end(0, EXIT_TOO_LONG)
    assert "rank 0 was ended where a trial took longer than it may (--limit)" in attempts.last_end("--limit")
    attempts.note_end(2, 3)
    assert attempts.last_end("--limit") == "rank 2 ended with exit code 3"
    attempts.note_error(2, "KeyError: 'labels'")
    assert attempts.last_end("--limit") == "rank 2 raised KeyError: 'labels'"


def test_three_ends_in_a_row_are_too_many(tmp_path: Path) -> None:
    """A trial that was run to its end between them starts the count anew."""
    attempts = Attempts(tmp_path)
    journal = NotingJournal(tmp_path / "trial", attempts)
    for _ in range(2):
        attempts.note_end(1, -9)
        attempts.note_end(1, -9)
        attempts.check_progress("--limit")
        with journal.running({"trial": 1}):
            pass
    for _ in range(3):
        attempts.note_end(1, -9)
    with pytest.raises(WorkerError, match="3 times in a row without finishing a trial, at last so: rank 1 ended"):
        attempts.check_progress("--limit")


def test_torchs_words_on_an_end_are_understood(tmp_path: Path) -> None:
    """The arguments of its message are exit code and local rank; any other message is let pass."""
    attempts = Attempts(tmp_path)
    logger = logging.getLogger(agent._ENDS_LOGGER)
    with agent._ends_noted(attempts, "--limit"):
        logger.error("failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s", -9, 3, 77, "python")
        logger.error("failed (exitcode: %s)", "unknown")
        logger.error("something else")
    assert attempts.last_end("--limit").startswith("rank 3 ended with signal 9")
    logger.error("failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s", -6, 1, 77, "python")
    assert "rank 3" in attempts.last_end("--limit"), "afterwards nobody listens"
