"""The configs of the papers' sizes have the papers' parameters, and the papers' tokens of a step and of a run. (MoR's
tokens of a step, and those of a run but for 360M, are our choice.) By arithmetic each fits into an 80 GB GPU."""
import dataclasses
import re

import pytest
import torch

from common import options
from common.checkpoint import load_start
from common.data import is_task
from common.tasks import TaskBatches
from conftest import ROOT

TOY = re.compile(r".*_tiny|task_.*|.*shakespeare.*|.*_uptrain")
VOCAB = {"gpt2": 50257, "hf:HuggingFaceTB/SmolLM-135M": 49152}
# These numbers are the papers': millions of parameters, tokens of a step, and billions of tokens of a run. The
# parameters of rt are those of the matrices of the blocks, and those of mor are the plain model's beside it.
RT, LRT, MOR, RAT = 2 ** 18, 2 ** 19, 2 ** 19, 2 ** 21
PAPER = {"rt_150m_12l": (151, RT, 3), "rt_150m_6l": (143, RT, 3), "rt_300m_24l": (302, RT, 6),
         "rt_300m_12l": (285, RT, 6), "rt_300m_6l": (302, RT, 6), "lrt_20l": (1320, LRT, 13.2),
         "lrt_24l": (1994, LRT, 19.9), "rat_1300m": (1299, RAT, 100), "rat_swa_1300m": (1286, RAT, 100),
         "rat_200m": (206, RAT // 2, 15),
         **{f"mor_{size}m": (size, MOR, 20) for size in (135, 360, 730, 1700)}}
NAMES = sorted(PAPER)
OURS = "gpt", "rt", "lrt", "rat", "relaxed", "mor"
# A run below is (the file's name, changed options), because one file of MoR is three models. For MoR there are the layers
# of the plain model, MoR-2, MoR-3 and MoR-4, and the billions of tokens of the smallest budget.
LAYERS = {135: (30, 30, 32, 30), 360: (32, 32, 32, 34), 730: (26, 26, 26, 26), 1700: (24, 24, 26, 26)}
SMALLEST = {135: 9.2, 360: 3.6, 730: 1.8, 1700: 0.8}
MOR_3 = {135: 42, 360: 118, 730: 252, 1700: 670}     # millions of parameters with three recursions
RUNS = [run for name in NAMES for run in (
    [(name, dict(n_loop=r, n_layer=LAYERS[PAPER[name][0]][r - 1])) for r in (2, 3, 4)]
    if name.startswith("mor_") else [(name, {})])]
# These are the bytes of activations a token, layer and channel, at most. They were measured at the peak of forward and
# backward pass under bfloat16 autocast on a CPU (two heads, 1,024 tokens), without weights and gradients. The number of
# rt includes the copies of CUDA graphs.
ACTIVATIONS = {"rt": 60, "lrt": 120, "mor": 45, "rat": 40}
LOGITS = 12     # bytes a token and entry of the vocabulary, in the backward pass of an eager loss; LRT has two losses


def test_each_large_config_of_our_models_is_here():
    """A fork's model may have any config."""
    large = {p.stem for p in ROOT.glob("configs/*.yaml") if not TOY.fullmatch(p.stem)
             and options.load_yaml(p).get("model", "gpt") in OURS}
    assert large == PAPER.keys()


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.yaml")), ids=lambda file: file.stem)
def test_a_config_has_known_options_and_fits_its_task(file):
    cfg, fields, _ = options.merge({"config": str(file), "run": "r"}, load_start)
    if is_task(cfg.dataset):
        TaskBatches(cfg, fields["block_size"])


def build(name, **changes):
    """Return the config's values, and its model on the meta device."""
    values = {**options.load_yaml(ROOT / "configs" / f"{name}.yaml"), **changes}
    module, tokenizer = options.model_module(values["model"]), values.get("tokenizer")
    if "vocab_size" not in values:
        values["vocab_size"] = VOCAB.get(tokenizer) or int(tokenizer.removeprefix("bpe:"))
    fields = {f.name for f in dataclasses.fields(module.Config)}
    with torch.device("meta"):
        return values, module.Model(module.Config(**{k: v for k, v in values.items() if k in fields}))


def count(parameters):
    return sum(p.numel() for p in parameters)


@pytest.mark.parametrize("name, changes", RUNS)
def test_size_tokens_and_memory(name, changes):
    """Parameters and tokens are those of the paper, and a micro-batch fits into 80 GB by arithmetic."""
    values, model = build(name, **changes)
    family, (millions, step, billions) = values["model"], PAPER[name]
    cfg, total = model.cfg, count(model.parameters())
    size = total
    if family == "rt":
        size = count(p for p in model.blocks.parameters() if p.dim() == 2)
    elif family == "mor":
        if cfg.n_loop == 3:     # Tables 3, 7 and 8 count without embedding and routers
            stored = count(p for n, p in model.named_parameters() if "wte" not in n and "router" not in n)
            assert abs(stored / 1e6 - MOR_3[millions]) < (5 if millions == 1700 else 0.6)
        assert values["warmup_steps"] == round(0.05 * SMALLEST[millions] * 1e9 / step)
        plain = dict(router="none", n_loop=1, share="cycle", n_layer=LAYERS[millions][0])
        size = count(build(name, **plain)[1].parameters())
    assert abs(size / 1e6 - millions) < 0.03 * millions
    tokens, accumulation = values["batch_size"] * cfg.block_size, values["gradient_accumulation_steps"]
    assert tokens * accumulation == step and accumulation % 8 == 0
    assert abs(step * values["max_steps"] / 1e9 - billions) < 0.01 * billions

    weights = 16 * total            # gradients and Adam's two moments are included; Muon has one
    activations = ACTIVATIONS[family] * tokens * cfg.n_layer * cfg.n_embd
    logits = (1 + (family == "lrt")) * LOGITS * tokens * cfg.vocab_size
    assert weights + activations + logits < 80e9



GEMMA_2B = dict(vocab_size=256000, n_layer=18, n_head=8, n_kv_head=1, n_embd=2048, head_dim=256, n_mlp=16384,
                mlp="geglu", scale_embeddings=True)
TINYLLAMA = dict(vocab_size=32000, n_layer=22, n_head=32, n_kv_head=4, n_embd=2048, n_mlp=5632, tie_embeddings=False)
SMOLLM = dict(vocab_size=49152, n_layer=32, n_head=15, n_kv_head=5, n_embd=960, n_mlp=2560)


@pytest.mark.parametrize("name, source, changes, source_millions, millions, billions", [
    ("relaxed_uptrain", GEMMA_2B, {}, 1980, 1600, 60), ("relaxed_uptrain", GEMMA_2B, dict(rank=0), 1980, 990, 60),
    ("relaxed_uptrain", TINYLLAMA, dict(rank=256), 970, 690, 60), ("mor_uptrain", SMOLLM, {}, 315, 118, 5),
    ("mor_uptrain", SMOLLM, dict(n_loop=2), 315, 167, 5)])
def test_uptraining(name, source, changes, source_millions, millions, billions):
    """The sizes without embeddings, and the tokens, are those of the papers."""
    values, model = build(name, **source, **changes)
    _, before = build(name, **source, **changes, model="gpt")
    embeddings = (1 if model.cfg.tie_embeddings else 2) * model.wte.weight.numel()
    for size, stated in ((count(before.parameters()), source_millions), (count(model.parameters()), millions)):
        assert abs((size - embeddings) / 1e6 - stated) < 0.01 * stated
    step = values["batch_size"] * values["gradient_accumulation_steps"] * values["block_size"]
    assert step == 2 ** 21 and abs(step * values["max_steps"] / 1e9 - billions) < 0.001 * billions
