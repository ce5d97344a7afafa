"""The tests can fail: each bug below is planted into a copy of the repository, and the named tests must notice."""
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

# A bug has its file, the text that stands there, the text that the bug puts in its place, and the tests that must fail.
BUGS = {
    "mask off by one": ("model_gpt.py", ".triu(S - T + 1)", ".triu(S - T + 2)",
        "test_models.py -k test_naive_is_fast and gpt-default"),
    "cache not advanced": ("decoding.py", "self.lengths += slots.n_new", "pass",
        "test_models.py -k cache_in_any_split"),
    "wrong by 1e-8 (a slack tolerance would pass it)": ("model_gpt.py",
        "/ math.sqrt(q.size(-1))  ", "/ math.sqrt(q.size(-1)) * (1 + 1e-8)",
        "test_models.py -k test_naive_is_fast"),
    "seed and step added": ("common/data.py", "SeedSequence([seed, step])",
        "SeedSequence([seed + step])", "test_tasks.py -k pure_function and words"),
    "NaN trains on": ("train.py", "if not math.isfinite(logged[key]):",
        "if logged[key] == math.inf:", "test_train.py -k is_not_finite"),
    "contents not verified": ("common/checkpoint.py", "!= content[-32:]:",
        "!= content[-32:] and False:", "test_checkpoint.py -k damaged_checkpoints and flip"),
    "renamed before it is on the disk": ("common/checkpoint.py",
        "            os.fsync(f.fileno())\n", "", "test_checkpoint.py -k order_of_a_save"),
    "pickle runs": ("common/checkpoint.py", "weights_only=True", "weights_only=False",
        "test_checkpoint.py test_shared.py -k hostile or executes"),
    "names may leave their root": ("common/options.py", "if not NAME.fullmatch(name)",
        "if not NAME.search(name)", "test_bad_input.py -k escape"),
    "serve: random numbers of another request": ("serve.py", "r.generator))", "slots[0].request.generator))",
        "test_serve.py -k sampled_answers"),
    "Triton: tiles skipped too early": ("kernels_triton.py",
        "last = tl.cdiv(count_upto(pos_ptr, n, some_high), BLOCK)",
        "last = count_upto(pos_ptr, n, some_high) // BLOCK",
        "interpreted_kernels.py -k attend_is_the_definition"),
    "val: not by the hash": ("prepare.py", ".digest() < self.edge", ".digest()[::-1] < self.edge",
        "test_prepare.py -k split_of_its_hash"),
    "differences of other seeds": ("lab/reproduce.py", 'known.get(result["seed"])', "known.get(1)",
        "test_reproduce.py -k paired"),
    "micro-batches weigh the same": ("train.py", "count / total * procs.world)",
        "1 / cfg.gradient_accumulation_steps * procs.world)",
        "test_train.py -k one_large_batch and gpt"),
    "dropout not reseeded": ("train.py", "        seed_forward(cfg.seed, run.step, index)\n", "",
        "test_train.py -k two_processes"),
    "old settings on resume": ("common/optim.py", '"param_groups": now', "",
        "test_train.py -k changed_key_holds"),
    "MoR: all tokens compete": ("model_mor.py", "s.masked_fill(~active, -math.inf)", "s",
        "test_mor.py -k routing_is_its_equations and expert and 13"),
    "LRT: memory of the position itself": ("model_lrt.py",
        "previous = shifted(m, zero)[:, subset]", "previous = m[:, subset]",
        "test_lrt.py -k each_path_is_its_equations"),
    "graph: a length of the host": ("model_rat.py", "n_slots if cache.static else min(", "min(",
        "test_graphs.py -k replayed and rat-default and ragged"),
    "graph: slots of a moment": ("decoding.py", "self.max_len if self.static else min(", "min(",
        "test_graphs.py -k replayed and gpt-default and ragged"),
    "graph: MoR reads whether some go on": ("model_mor.py", "if not self.cache.static and not chosen.any():",
        "if not chosen.any():", "test_graphs.py -k replayed and mor-default and ragged"),
    "graph: inputs are not copied": ("graphs.py", "mine.copy_(given)", "pass",
        "test_graphs.py -k replayed and gpt-default and ragged"),
}
FEW = 1        # the first one is planted in every run, and all of them with --full


@pytest.mark.parametrize("bug", BUGS)
def test_the_place_of_a_bug_is_there(bug):
    file, old, _, _ = BUGS[bug]
    assert (ROOT / file).read_text().count(old) == 1, "the plant is out of date"


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.full] * (n >= FEW)) for n, bug in enumerate(BUGS)])
def test_a_planted_bug_is_caught(bug, tmp_path):
    """The named tests fail in a copy of the repository that has the bug."""
    if bug.startswith("Triton"):
        pytest.importorskip("triton")
    file, old, new, tests = BUGS[bug]
    copy, text = tmp_path / "copy", (ROOT / file).read_text()
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "__pycache__"))
    (copy / file).write_text(text.replace(old, new))
    files, _, words = tests.partition(" -k ")
    more = {"TRITON_INTERPRET": "1"} if files == "interpreted_kernels.py" else {}
    p = subprocess.run([sys.executable, "-m", "pytest", "-n0", "--full", "-x", "-q", "-p", "no:cacheprovider", "-k", words,
                        *(f"tests/{file}" for file in files.split())], cwd=copy, text=True, capture_output=True,
                       timeout=600, env={**os.environ, **more, "PYTHONPATH": ""})
    assert p.returncode == 1 and " failed" in p.stdout, f"not caught: {p.stdout[-2000:]}\n{p.stderr[-500:]}"
