"""demo: a plan of real size, and from a model to training under its config, in a minute and without a GPU."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch

from splittune import SplitConfig
from splittune.cli import demo as command
from splittune.demo import DEMO_STEPS, gpt2
from tests.cli.command_line import Run, trials_in


@pytest.fixture(autouse=True)
def shallow_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 of a single layer: the other eleven do the same, and take half a minute."""
    monkeypatch.setattr(command, "gpt2", functools.partial(gpt2, num_layers=1))


def test_the_demo_trains_what_it_tuned(run: Run, tmp_path: Path) -> None:
    """The demo's even split fails or is slower, the tuned one trains: the loss falls and no device exceeds its plan.

    Before that GPT-2 keeps its whole batch, where halving leaves a part of it and is slower.
    """
    threads = torch.get_num_threads()
    ended = run("demo", "--out", "demo")
    torch.set_num_threads(threads)
    assert ended.code == 0
    files = {"split.json", "trials.csv", "devices.csv", "explanation.txt", "result.json", "report.html"}
    assert {path.name for path in (tmp_path / "demo").iterdir()} == files | {"gpt2"}
    assert {path.name for path in (tmp_path / "demo/gpt2").iterdir()} == files
    # it ends by itself, not at its limit: an even split that no trial is left for would flatter the tuned one
    assert json.loads((tmp_path / "demo/gpt2/result.json").read_text())["stopped"] == "converged"
    halved = re.search(r"Halving the batch, as people do: (\d+) a step, .*: ([\d.,]+) samples/s\.", ended.out)
    kept = re.search(r"splittune keeps 64 samples a step, .*: ([\d.,]+) samples/s, ([\d.]+) times as many", ended.out)
    assert halved is not None
    assert kept is not None
    assert int(halved[1]) < 64
    slower, faster = float(halved[2].replace(",", "")), float(kept[1].replace(",", ""))
    assert float(kept[2]) == pytest.approx(faster / slower, abs=0.06)
    assert faster > slower
    config = SplitConfig.load(tmp_path / "demo/split.json")
    trained = re.search(r"Trained (\d+) steps of (\d+) samples under it: loss ([\d.]+) -> ([\d.]+), (.*)", ended.out)
    assert trained is not None
    assert (int(trained[1]), int(trained[2])) == (DEMO_STEPS, config.split.global_batch_size)
    assert float(trained[4]) < 0.7 * float(trained[3])
    assert trained[5] == f"memory as planned on all {config.split.num_devices} GPUs."
    tuned = re.search(
        r"^Tuned: .*, ([\d,]+) samples/s, ([\d,]+) as the even split's .*modelled", ended.out, re.MULTILINE
    )
    assert tuned is not None
    assert int(tuned[1].replace(",", "")) > int(tuned[2].replace(",", ""))
    assert "did not fit" not in ended.out
    lines = ended.out.splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100
    # so little memory is no straight line of the batch, for it is handed out 20 MiB at a time: two risks may be wrong
    assert [trial["outcome"] for trial in trials_in(tmp_path / "demo")].count("out_of_memory") <= 2
