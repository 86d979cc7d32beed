"""The notebook runs from top to bottom, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


def test_the_quickstart_runs(tmp_path):
    """Every cell runs, its own assertions hold, and the files are written where it says."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert {path.name for path in (tmp_path / "runs/quickstart").iterdir()} == {
        "split.json",
        "trials.csv",
        "devices.csv",
        "explanation.txt",
        "report.html",
        "result.json",
    }


def test_its_stored_outputs_name_no_machine():
    """What is shown was run, and carries no path of where."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells[:2])
    shown = "\n".join(str(output) for cell in cells for output in cell.outputs)
    assert "site-packages" not in shown
    assert "Traceback" not in shown
