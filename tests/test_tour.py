"""tour.ipynb: its form and its outputs, and with --full whether it runs and prints what it shows.

    python tests/test_tour.py       runs the notebook from top to bottom and writes its outputs
"""
import copy
import os
import json
import re
import socket
from pathlib import Path

import pytest

nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "tour.ipynb"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[/\\]+\w[\w.-]*[/\\]+\w")      # /a/b, ~/a/b, C:\a\b


def run(notebook):
    """Execute the notebook in the project's root. Nothing stays in it that differs from machine to machine: no times, no
    version of Python, and not the line that says which kernels run."""
    client = nbclient.NotebookClient(notebook, timeout=1200, record_timing=False, kernel_name="python3",
                                     resources={"metadata": {"path": str(ROOT)}})
    # lab.plot, which other tests import, chooses a backend that shows no picture in a notebook.
    client.execute(env={name: value for name, value in os.environ.items() if name != "MPLBACKEND"})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        cell.metadata = nbformat.from_dict({})
        cell.outputs = [o for o in cell.outputs if not o.get("text", "").startswith("kernels: ")]
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """Return the lines that code cells print, a list for each cell."""
    return [[line for o in cell.outputs if o.get("name") == "stdout" for line in o.text.splitlines()]
            for cell in code_cells(notebook)]


def check(notebook):
    """Assert that the outputs are those of one run from top to bottom, that cells are short and draw where they say so, that
    all that is printed is a true statement, and that nothing tells of the machine."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        lines = [line for line in cell.source.split("\n") if line.strip()]
        assert len(lines) <= 15 and max(map(len, lines)) <= 100, cell.source
        draws = "plt.subplots(" in cell.source or "plot_influence(" in cell.source
        assert sum("image/png" in o.get("data", {}) for o in cell.outputs) == draws, cell.source
        assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in cell.outputs), cell.source
    assert all(line.endswith(": True") for lines in printed(notebook) for line in lines)
    shown = [notebook.metadata, *(cell.metadata for cell in notebook.cells)]
    shown += [{k: v for k, v in o.get("data", o).items() if k != "image/png"} for cell in cells for o in cell.outputs]
    told = json.dumps(shown)
    assert not PATH.search(told) and socket.gethostname() not in told and "object at 0x" not in told


def test_form():
    notebook = nbformat.read(TOUR, 4)
    nbformat.validate(notebook)
    check(notebook)
    assert TOUR.stat().st_size < 1_500_000


@pytest.mark.full
def test_runs_from_top_to_bottom():
    """It draws and prints in each cell what it shows. Trained numbers stand in pictures only, because they may differ
    between processors."""
    notebook = nbformat.read(TOUR, 4)
    again = run(copy.deepcopy(notebook))
    check(again)
    assert printed(again) == printed(notebook)


if __name__ == "__main__":
    nbformat.write(run(nbformat.read(TOUR, 4)), TOUR)
