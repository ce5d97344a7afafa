"""These are rules on the source text: nothing executes what it loads, ruff finds nothing, and imports go one way."""
import ast
import graphlib
import re
import shutil
import tomllib

import runs
from conftest import ROOT, python

SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("lab/*.py")])
FORBIDDEN = {"eval", "exec", "compile", "__import__"}
RUNNERS = "pickle", "dill", "marshal", "subprocess"     # modules that run programs, or what they load


def dangers(tree):
    """Return the calls and imports that could run what a file holds: eval, exec, pickle, torch.load without
    weights_only=True, trust_remote_code. A name that is imported from a module counts as the module's."""
    whole = {a.asname or a.name: f"{node.module}.{a.name}" for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom) for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            name = whole.get(name, name)
            if (name in FORBIDDEN or name.startswith((*(f"{module}." for module in RUNNERS), "os.system", "os.popen"))
                    or name == "torch.load" and keywords.get("weights_only") != "True"
                    or name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False"
                    or keywords.get("trust_remote_code", "False") != "False"):
                yield name
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from {getattr(node, "module", ""), *(a.name for a in node.names)} & {*RUNNERS}


def test_nothing_executes_what_it_loads():
    """reproduce.py may start programs, which are train.py and its like, with options."""
    files = [*SOURCES, *ROOT.glob("lab/experiments/*.py")]
    found = {f.name: {d.split(".")[0] for d in dangers(ast.parse(f.read_text()))} for f in files}
    assert {name: calls for name, calls in found.items() if calls} == {"reproduce.py": {"subprocess"}}
    for hidden in ("from subprocess import run", "from os import system as go; go('x')",
                   "from torch import load as read; read(f, weights_only=False)"):
        assert [*dangers(ast.parse(hidden))], hidden


def test_links_and_numbers_of_the_readme():
    """Each link to a heading of this project finds it. The numbers of README's results stand in lab/, each with its
    interval."""
    anchors = {}
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("lab/**/*.md")):
        titles = re.findall("^#+ (.*)$", file.read_text(), re.M)
        anchors[file] = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for file in anchors:
        for path, anchor in re.findall(r"\]\(([^):]*?)#([^)]*)\)", file.read_text()):
            target = (file.parent / path).resolve() if path else file
            assert anchor in anchors[target], f"{file.name}: {path}#{anchor}"
    losses = lambda text: re.findall(r"\b\d\.\d{3}\b", text)
    results = (ROOT / "lab/RESULTS.md").read_text() + (ROOT / "lab/results/tables.md").read_text()
    section = (ROOT / "README.md").read_text().split("## What we found")[1].split("\n## ")[0]
    assert {*losses(section)} <= {*losses(results)}

    def intervals(text):
        """Return the set of "0.057 (0.045 to 0.070)", or "0.057 behind, ...". What is below 0 is turned round."""
        of = re.findall(r"(-?\d\.\d{3})(?:(?: \w+)?,|) \(?(-?\d\.\d{3}) to (-?\d\.\d{3})", " ".join(text.split()))
        return {(d, a, b) if d >= 0 else (-d, -b, -a) for d, a, b in (map(float, values) for values in of)}
    assert len(found := intervals(section)) == 27 and found <= intervals(results), found - intervals(results)


def test_a_package_has_all_files():
    with open(ROOT / "pyproject.toml", "rb") as f:
        listed = {*tomllib.load(f)["tool"]["setuptools"]["py-modules"]}
    assert listed == {f.stem for f in ROOT.glob("*.py")}, "py-modules in pyproject.toml lists the root's files"


def test_ruff_finds_nothing():
    """pyproject.toml says what ruff looks for."""
    done = python("-m", "ruff", "check", ".", "--exclude", ".venv*", "--no-cache")
    assert done.returncode == 0, done.stdout


def imports(tree):
    """Return the project's modules that a file imports, in functions too: {"common.options", "model_gpt"}."""
    modules = {name_of(f) for f in SOURCES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {a.name for a in node.names} & modules
        if isinstance(node, ast.ImportFrom):
            yield from {node.module, *(f"{node.module}.{a.name}" for a in node.names)} & modules


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


# The two wings and the one door. The first pattern that fits a file's name says what the file may import.
ARROWS = {
    # Reading: a model file can be copied into any project, together with the files that stand here.
    "decoding|graphs|kernels_triton": "", "kernels|rt_triton": "kernels_triton", "model_gpt": "decoding",
    "rt_wavefront": "model_gpt|kernels|graphs|rt_triton", "model_rt": "model_gpt|kernels|rt_wavefront|decoding",
    "model_(rat|lrt|relaxed|mor)": "model_gpt|kernels|graphs|decoding", "model_.*": "(?!train$|lab).*",    # of a fork
    # Running.
    "prepare": r"common\..*", "sample": r"common\..*|graphs|decoding", "serve": r"common\..*|sample|model_gpt|decoding",
    "train": r"common\..*|sample|prepare|graphs|lab\.plot", r"common\..*": r"common\..*", r"lab\..*": "(?!train$).*"}


def test_imports_go_one_way():
    trees = {name_of(f): ast.parse(f.read_text()) for f in SOURCES}
    reads = {name: set(imports(tree)) for name, tree in trees.items()}
    for name, modules in reads.items():
        arrow = next(to for of, to in ARROWS.items() if re.fullmatch(of, name))
        assert [m for m in modules if not re.fullmatch(arrow, m)] == [], name
    graphlib.TopologicalSorter(reads).prepare()         # raises an error that names the circle, if there is one


# A release of one method needs these files, here RAT's. CONTRIBUTING.md lists the same files.
ALONE = "model_gpt.py", "model_rat.py", "decoding.py", "graphs.py", "kernels.py", "train.py", "sample.py", "prepare.py"


def test_one_method_alone(tmp_path, data_dir):
    """The files of one method train and sample as they are. The picture at a run's end is of lab, and it is
    optional."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    for name in ALONE:
        shutil.copy(ROOT / name, tmp_path / name)
    small = runs.arguments("rat", tmp_path / "out", data_dir, "max_steps=2", "sample_tokens=5")
    for name, *keys in ("train.py", *small), ("sample.py", tmp_path / "out" / "r", "max_new_tokens=5"):
        done = python(tmp_path / name, *keys, PYTHONPATH="")   # the repository itself is not found
        assert done.returncode == 0, done.stderr
    listed = (ROOT / "CONTRIBUTING.md").read_text().split("One method alone")[1].split("\n\n")[0]
    assert [name for name in ALONE if name.removesuffix(".py") not in listed] == []
