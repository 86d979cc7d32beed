"""What people see of a verification."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from splittune.units import MIB
from splittune.verify.console import show_verification
from tests.verify.jobs import verification


def test_what_people_see_of_the_result() -> None:
    """A row for every device used, with plan and peaks; the loss, the notes, and the evaluation batch size."""
    file = io.StringIO()
    result = verification(evaluation_peak_reserved_bytes=(43 * MIB, None), losses=(2.5, 1.25), notes=("Take note.",))
    config = replace(result.config, eval_batch_size=512, planned_peak_reserved_bytes=())
    show_verification(replace(result, config=config), Console(file=file, width=120))
    shown = file.getvalue()
    first, second = [line for line in shown.splitlines() if "GPU" in line]
    assert [cell.strip() for cell in first.split("│")[2:5]] == ["not measured", "42.0 MiB", "43.0 MiB"]
    assert [cell.strip() for cell in second.split("│")[2:5]] == ["not measured", "42.0 MiB", "no more"]
    assert "The loss was 2.500 at step 1 and 1.250 at step 2.\nTake note.\n" in shown
    assert "Evaluation batches of 512 samples keep the headroom" in shown
    assert "virtual" not in shown


def test_devices_of_one_name_with_the_same_figures_share_a_line() -> None:
    """As many lines as there is to tell; memory of virtual devices is called accounted."""
    file = io.StringIO()
    result = verification(is_modelled=True)
    like = replace(result, devices=(result.devices[0],) * 2, memory=(result.memory[0],) * 2)
    like = replace(like, config=replace(like.config, min_headroom_bytes=(0, 0)))
    show_verification(like, Console(file=file, width=120))
    (line,) = [line for line in file.getvalue().splitlines() if "MiB" in line]
    assert "GPU 0-1  T400-4GB" in line
    assert "virtual GPUs: accounted" in file.getvalue()
