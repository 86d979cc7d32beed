"""demo: from a model to training under its config, in a minute and without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from splittune import SplitConfig
from splittune.demo import DEMO_STEPS
from tests.cli.command_line import Run, trials_in


def test_the_demo_trains_what_it_tuned(run: Run, tmp_path: Path) -> None:
    """The demo's even split fails or is slower, the tuned one trains: the loss falls and no device exceeds its plan."""
    threads = torch.get_num_threads()
    ended = run("demo", "--out", "demo")
    torch.set_num_threads(threads)
    assert ended.code == 0
    assert {"split.json", "trials.csv", "devices.csv", "explanation.txt"} == {
        path.name for path in (tmp_path / "demo").iterdir()
    }
    config = SplitConfig.load(tmp_path / "demo/split.json")
    trained = re.search(r"Trained (\d+) steps of (\d+) samples under it: loss ([\d.]+) -> ([\d.]+), (.*)", ended.out)
    assert trained is not None
    assert (int(trained[1]), int(trained[2])) == (DEMO_STEPS, config.split.global_batch_size)
    assert float(trained[4]) < 0.7 * float(trained[3])
    assert trained[5] == f"memory as planned on all {config.split.num_devices} GPUs."
    speedup = re.search(r"^([\d.]+)x faster at the same batch size: .*modelled", ended.out, re.MULTILINE)
    assert speedup is not None
    assert float(speedup[1]) > 1
    assert "did not fit" not in ended.out
    lines = ended.out.splitlines()
    assert len(lines) <= 38
    assert max(map(len, lines)) <= 100
    # so little memory is no straight line of the batch, for it is handed out 20 MiB at a time: one guess may be wrong
    assert [trial["outcome"] for trial in trials_in(tmp_path / "demo")].count("out_of_memory") <= 1
