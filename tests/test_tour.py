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


def pictures(cell):
    return [o for o in cell.outputs if "image/png" in o.get("data", {})]


def printed(notebook):
    """The lines that code cells print, a list for each cell."""
    return [[line for o in cell.outputs if o.get("name") == "stdout" for line in o.text.splitlines()]
            for cell in code_cells(notebook)]


def sections(notebook):
    """{title: cells} of the parts that begin with ##."""
    found, title = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            title = cell.source.split("\n")[0]
        if title.startswith("## "):
            found.setdefault(title, []).append(cell)
    return found


def faults(notebook):
    """What is wrong with the notebook, a list of sentences."""
    found, cells = [], code_cells(notebook)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the outputs are not those of one run from top to bottom")
    for number, cell in enumerate(cells, 1):
        lines = [line for line in cell.source.split("\n") if line.strip()]
        if len(lines) > 15 or max(map(len, lines)) > 100:
            found.append(f"code cell {number} has more than 15 lines or 100 columns")
        draws = "plt.subplots(" in cell.source or "plot_influence(" in cell.source
        if len(pictures(cell)) != draws:
            found.append(f"code cell {number} has {len(pictures(cell))} pictures, not {int(draws)}")
        if any(o.output_type == "error" or o.get("name") == "stderr" for o in cell.outputs):
            found.append(f"code cell {number} has an error or a warning")
        if any("object at 0x" in o.get("data", {}).get("text/plain", "") for o in cell.outputs):
            found.append(f"code cell {number} shows an address")
    for title, part in sections(notebook).items():
        heading, *questions = re.split(r"^\d\. ", part[-1].source, flags=re.M)
        if heading.strip() != "**Two questions.**" or ["?" in q and "`" in q for q in questions] != [True, True]:
            found.append(f"{title} does not end with two questions that name what to change")
    if not all(line.endswith(": True") for lines in printed(notebook) for line in lines):
        found.append("a statement is not true")
    shown = [notebook.metadata, *(cell.metadata for cell in notebook.cells)]
    shown += [{k: v for k, v in o.get("data", o).items() if k != "image/png"} for cell in cells for o in cell.outputs]
    if PATH.search(json.dumps(shown)) or socket.gethostname() in json.dumps(shown):
        found.append("an output tells of the machine")
    return found


def test_form():
    notebook = nbformat.read(TOUR, 4)
    nbformat.validate(notebook)
    assert faults(notebook) == []
    assert [re.split(r"[ :]+", title)[2] for title in sections(notebook)] == [
        "Who", "RT", "LRT", "RAT", "Relaxed", "MoR", "Kernels"]
    assert TOUR.stat().st_size < 1_500_000


def prints(text, name="stdout"):
    output = nbformat.v4.new_output("stream", text=text, name=name)
    return lambda nb: code_cells(nb)[5].outputs.append(output)


PLANTS = {
    "a line too many": lambda nb: code_cells(nb)[2].update(source=code_cells(nb)[2].source + "\nx = 1"),
    "a long line": lambda nb: code_cells(nb)[0].update(source="x" * 101),
    "not executed": lambda nb: code_cells(nb)[4].update(execution_count=None),
    "no picture": lambda nb: code_cells(nb)[4].update(outputs=[]),
    "two pictures": lambda nb: code_cells(nb)[4].outputs.extend(code_cells(nb)[4].outputs),
    "a warning": prints("UserWarning: slow", "stderr"),
    "a false statement": prints("tiled = naive: False"),
    "an absolute path": prints("/a/b.py: True"),
    "a path of Windows": prints("C:\\a\\b.py: True"),
    "a name": prints(f"{socket.gethostname()}: True"),
    "a path in the metadata": lambda nb: nb.metadata.update(file="/a/b.ipynb"),
    "an address": lambda nb: code_cells(nb)[5].outputs.append(
        nbformat.v4.new_output("execute_result", data={"text/plain": "<Legend object at 0x7f00>"}, execution_count=6)),
    "one question": lambda nb: nb.cells[-2].update(source=nb.cells[-2].source.split("\n2. ")[0]),
    "nothing to change": lambda nb: nb.cells[-2].update(source=nb.cells[-2].source.replace("`", "")),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_faults_are_found(plant):
    notebook = copy.deepcopy(nbformat.read(TOUR, 4))
    PLANTS[plant](notebook)
    assert len(faults(notebook)) >= 1


@pytest.mark.full
def test_runs_from_top_to_bottom():
    """It draws and prints in each cell what it shows. Trained numbers stand in pictures only, because they may differ
    between processors."""
    notebook = nbformat.read(TOUR, 4)
    again = run(copy.deepcopy(notebook))
    assert faults(again) == []
    assert printed(again) == printed(notebook)


if __name__ == "__main__":
    nbformat.write(run(nbformat.read(TOUR, 4)), TOUR)
