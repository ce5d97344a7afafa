"""Rules on the source text: nothing executes what it loads, lines and functions are short, requirements pinned."""
import ast
import graphlib
import re

import pytest

from conftest import ROOT

SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("lab/*.py")])
FORBIDDEN = {"eval", "exec", "compile", "__import__"}


def dangers(tree):
    """Calls that could run what a file holds: eval, exec, pickle, torch.load without weights_only=True,
    trust_remote_code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if (name in FORBIDDEN or name.startswith(("pickle.", "marshal.", "os.system", "subprocess."))
                    or name == "torch.load" and keywords.get("weights_only") != "True"
                    or name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False"
                    or keywords.get("trust_remote_code", "False") != "False"):
                yield name
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (a.name for a in node.names if a.name in ("pickle", "dill", "marshal", "subprocess"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.name)
def test_nothing_executes_what_it_loads(file):
    starts_programs = ("subprocess",) if file.name == "reproduce.py" else ()     # train.py and its like, with keys
    assert [d for d in dangers(ast.parse(file.read_text())) if d.split(".")[0] not in starts_programs] == []


def test_the_scan_finds_what_it_looks_for():
    bad = "import pickle\npickle.load(f)\ntorch.load(f)\neval(x)\nload_dataset(n, trust_remote_code=True)\n"
    assert len(list(dangers(ast.parse(bad)))) == 5
    assert list(dangers(ast.parse("torch.load(f, weights_only=True)\nmodel.eval()"))) == []


@pytest.mark.parametrize("file", [*SOURCES, *sorted(ROOT.glob("configs/*.yaml"))], ids=lambda f: f.name)
def test_lines_and_functions_are_short(file):
    """No line beyond 120 columns, no function beyond 60 lines; every module opens with what it is."""
    text = file.read_text()
    assert [n for n, line in enumerate(text.splitlines(), 1) if len(line) > 120] == []
    if file in SOURCES:
        tree = ast.parse(text)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        assert ast.get_docstring(tree) and [n.name for n in functions if n.end_lineno - n.lineno >= 60] == []


def test_every_requirement_is_pinned():
    pinned = re.compile(r'[A-Za-z0-9_-]+==[0-9.]+(; sys_platform == "linux")?(\s+#.*)?$')
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert not line.strip() or line.startswith("#") or pinned.match(line), line


def imports(file):
    """The project's modules that a file imports, in functions too: {"common.keys", "model_gpt"}."""
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in SOURCES}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules)
        if isinstance(node, ast.ImportFrom):
            yield from ({node.module, *(f"{node.module}.{a.name}" for a in node.names)} & modules)


def test_imports_go_one_way():
    """No circle, nothing imports train.py, and no method's file another method's."""
    reads = {".".join(f.relative_to(ROOT).with_suffix("").parts): set(imports(f)) for f in SOURCES}
    reads["kernels"] -= {"kernels_triton"}      # an exception: loaded where there is a GPU
    assert not {r for name in ("sample", "serve") for r in reads[name] if r.startswith("lab")} and "serve" not in reads["sample"]
    assert [name for name in reads if "train" in reads[name]] == []
    for name in (n for n in reads if n.startswith("model_")):
        assert not {r for r in reads[name] if r.startswith("model_")} - {"model_gpt"}, name
    graphlib.TopologicalSorter(reads).prepare()         # an error that names the circle, if there is one
