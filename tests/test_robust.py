"""All models: random configurations run or are refused in one line."""
import math
import random
from dataclasses import fields

import pytest

from common import checkpoint
import runs
import sample
from common.keys import UserError, model_module
from conftest import MODELS

NUMBERS = {int: [0, 0, 1, 2, 3, 4, 8], float: [0.0, 0.1, 0.5, 1.0]}
SIZES = {"block_size": [2, 5, 16, 21], "n_layer": [2, 4, 6, 8, 3], "n_head": [1, 2, 3, 4], "n_kv_head": [0, 0, 1, 2],
         "norm_eps": [1e-5], "rope_theta": [100.0, 10000.0], "dropout": [0.0, 0.1]}
TRAINING = {"batch_size": [1, 2, 3], "gradient_accumulation_steps": [1, 2], "optimizer": ["adamw", "muon"],
            "lr_schedule": ["cosine", "linear", "trapezoid"], "dtype": ["float32", "bfloat16"], "grad_clip": [0, 1]}


def drawn(rng, model):
    """Keys with values: every size, half of the model's own keys."""
    keys = {name: rng.choice(values) for name, values in {**SIZES, **TRAINING}.items()}
    keys["n_embd"] = keys["n_head"] * rng.choice([3, 4, 8, 8, 16]) + (rng.random() < 0.1)
    for f in fields(model_module(model).Config):
        if f.name in keys or f.name == "vocab_size" or rng.random() < 0.5:
            continue
        values = f.metadata.get("allowed") or ([True, False] if f.type is bool else NUMBERS.get(f.type))
        if values:
            keys[f.name] = rng.choice(values)
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.full] * (n >= 24)) for n in range(200)])
def test_random_configurations_run_or_are_refused(seed, data_dir, tmp_path):
    """Refused: in one line, nothing is written. The first that is not trains, resumes and decodes."""
    rng, model = random.Random(seed), MODELS[seed % len(MODELS)]
    for keys in (drawn(rng, model) for _ in range(200)):
        try:
            trainer = runs.run(model, tmp_path / "out", data_dir, *keys, "max_steps=3")
            break
        except UserError as e:
            assert "\n" not in str(e).strip() and not (tmp_path / "out").exists(), keys
    more = runs.run(model, tmp_path / "out", data_dir, *keys, "max_steps=4", "resume=true")
    log = checkpoint.read_log(tmp_path / "out" / "r" / "log.jsonl")
    assert more.step == 4 and all(math.isfinite(v) for row in log for v in row.values()), keys
    trained, tokenizer, _ = checkpoint.load_run(tmp_path / "out" / "r")
    text = sample.sample_text(trained, tokenizer, "ab", min(5, trainer.model.cfg.block_size - 1), seed=1)
    assert text.startswith("ab"), keys
