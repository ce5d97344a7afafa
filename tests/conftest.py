"""All tests share this file. It puts the repository on the path, adds the options --full and --model, and makes a small data set and
tiny models."""
import importlib
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"     # results repeat for one thread count
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")     # of each of pytest's workers
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
FORKS = ROOT / "tests" / "forks"      # these are models as a user would add them
sys.path += [str(FORKS), str(ROOT / "lab" / "experiments")]     # models of both are found by their names
MODELS = [p.stem.removeprefix("model_") for folder in (ROOT, FORKS) for p in sorted(folder.glob("model_*.py"))]


def pytest_addoption(parser):
    parser.addoption("--model", help="only the contract of model_MODEL.py")
    parser.addoption("--full", action="store_true", help="also what is marked `full`; more random examples and kills")


def pytest_configure(config):
    """A property has 10 random examples, and 200 with --full. hypothesis does not make them smaller, and they are the
    same ones every time. But hypothesis also tries constants of the modules that are loaded, which may differ."""
    examples = 200 if config.getoption("--full") else 10
    hypothesis.settings.register_profile("here", max_examples=examples, derandomize=True, deadline=None, database=None,
                                         phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("here")


@pytest.fixture(autouse=True)
def float32_products():
    """Each test starts with exact float32 products, because a training on a GPU allows TF32 for the whole process."""
    torch.set_float32_matmul_precision("highest")


def pytest_collection_modifyitems(config, items):
    only, full = config.getoption("--model"), config.getoption("--full")
    if only and only not in MODELS:
        raise pytest.UsageError(f"--model={only}: there is no model_{only}.py; {', '.join(MODELS)}")
    of_one = lambda item: hasattr(item, "callspec") and only in item.callspec.params.values()
    kept = [(of_one(item) or not only) and (full or not item.get_closest_marker("full")) for item in items]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept) if not keep])
    items[:] = itertools.compress(items, kept)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if full:
            item.add_marker(pytest.mark.timeout(2400))      # 50 kills take long


def python(*arguments, **environment):
    """Run python in the repository. TRITON_INTERPRET is set only where it is given."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, env={**env, **environment}, text=True,
                          capture_output=True)


def snapshot(folder):
    """Return each path below folder with its time and bytes, or with None if it is not a file."""
    file = lambda p: (p.stat().st_mtime_ns, p.read_bytes())
    return {p: file(p) if p.is_file() else None for p in folder.rglob("*")}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Return a folder with the byte-level data set `words`, which is one document of 12,000 characters of made-up
    sentences."""
    import prepare
    root = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
    text = ""
    while len(text) < 12000:
        text += " ".join(rng.choices(words, k=8)).capitalize() + ".\n"
    (root / "words.txt").write_text(text)
    prepare.prepare(prepare.PrepareConfig(dataset=f"file:{root / 'words.txt'}", tokenizer="byte",
                                          data_dir=str(root), name="words"))
    return root


# These are sizes of models that the common ones below do not fit. A number of layers may have to divide a pattern, say.
SIZES = {"relaxed": dict(n_layer=4), "mor": dict(n_layer=5), "rat_loops": dict(chunk=1)}


@torch.no_grad()
def move(model, scale):
    """Move every parameter by N(0, scale), because initial zeros would hide errors, and loops would agree."""
    for p in model.parameters():
        p.add_(scale * torch.randn_like(p))
    return model


def tiny(name, **sizes):
    """Return a small float64 model of model_<name>.py in which every parameter is moved by N(0, 0.1)."""
    module = importlib.import_module(f"model_{name}")
    torch.manual_seed(0)
    small = dict(block_size=100, vocab_size=61, n_layer=2, n_head=4, n_embd=32)
    model = module.Model(module.Config(**{**small, **SIZES.get(name, {}), **sizes}))
    return move(model.double(), 0.1).eval()


def relative(a, b, floor=1e-30):
    """Return the largest difference of two tensors relative to the larger one's root mean square, or to floor if that
    is more."""
    scale = max(a.double().square().mean().sqrt().item(), b.double().square().mean().sqrt().item(), floor)
    return (a.double() - b.double()).abs().max().item() / scale
