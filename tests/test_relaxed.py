"""model_relaxed: its layers once more by hand, what is tied, conversion, distillation, early exit, and what runs."""
import itertools
import math
import sys
import zipfile
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import llama
import model_gpt
import model_relaxed
import checkpoint
import config
import plot
import prepare
import runs
import train
from conftest import relative, tiny
from test_gpt import rotate, saved_llama
from test_models import tokens

SHARES = "cycle", "sequence"
FULL = 1000         # a rank that no matrix here reaches


def relaxed(**sizes):
    """The tiny float64 model of conftest, six layers deep."""
    return tiny("relaxed", **{"n_layer": 6, "rank": 3, **sizes})


# ---- the equations, once more ----

def stored(cfg, layer):
    """The path of the block that unrolled layer `layer`, from 0, is: Table 5 of MoR."""
    N, R, edge = cfg.n_layer, cfg.n_loop, int(cfg.share.startswith("middle"))
    if edge and layer in (0, N - 1):
        return "last.0" if layer else "first.0"
    return f"blocks.{(layer - edge) // R if cfg.share.endswith('sequence') else (layer - edge) % ((N - 2 * edge) // R)}"


class ByHand:
    """A model's unrolled layers for one sequence, its states h (n, C): each matrix is W' + B A, formed and applied."""

    def __init__(self, model):
        self.cfg, self.w = model.cfg, dict(model.named_parameters())

    def of(self, layer):
        """The path of an unrolled layer's block, and which use of the block it is."""
        path = stored(self.cfg, layer)
        return path, [stored(self.cfg, before) for before in range(layer)].count(path)

    def times(self, x, layer, name):
        block, use = self.of(layer)
        w = self.w[f"{block}.{name}.weight"]
        if f"{block}.{name}.b" in self.w:
            w = w + self.w[f"{block}.{name}.b"][use].T @ self.w[f"{block}.{name}.a"][use]
        return x @ w.T

    def normed(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.cfg.norm_eps).sqrt() * self.w[name]

    def heads(self, x, layer, kind, at):
        """Queries or keys (n, heads, D) of normed x at positions at (n,)."""
        block, use = self.of(layer)
        y = self.times(x, layer, f"attn.w{kind}").unflatten(-1, (-1, self.cfg.head_dim))
        if self.cfg.qk_norm:
            norm = f"{block}.attn.{kind}_norm.weight"
            y = self.normed(y, norm if norm in self.w else f"{norm}s.{use}")
        return rotate(y, at, self.cfg.rope_theta) if self.cfg.pos == "rope" else y

    def keys_values(self, h, layer, at):
        x = self.normed(h, f"{self.of(layer)[0]}.norm1.weight")
        return self.heads(x, layer, "k", at), self.times(x, layer, "attn.wv").unflatten(-1, (-1, self.cfg.head_dim))

    def layer(self, h, layer, at, k, v, seen=None):
        """h after an unrolled layer. k, v (S, G, D): all that it may attend to, of positions seen (S,) (None: all)."""
        cfg, block = self.cfg, self.of(layer)[0]
        q = self.heads(self.normed(h, f"{block}.norm1.weight"), layer, "q", at)
        k, v = (x.repeat_interleave(cfg.n_head // cfg.n_kv_head, 1) for x in (k, v))
        distance = at[:, None] - (torch.arange(len(k)) if seen is None else seen)
        scores = torch.einsum("nhd,shd->hns", q, k) / math.sqrt(cfg.head_dim)
        p = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
        y = torch.einsum("hns,shd->nhd", p, v).flatten(1)
        h = h + self.times(y, layer, "attn.wo")
        x = self.normed(h, f"{block}.norm2.weight")
        up = self.times(x, layer, "mlp.w_up")
        up = F.silu(self.times(x, layer, "mlp.w_gate")) * up if cfg.mlp == "swiglu" else F.gelu(up)
        return h + self.times(up, layer, "mlp.w_down")

    def logits(self, h):
        return self.normed(h, "norm.weight") @ self.w.get("head.weight", self.w["wte.weight"]).T

    def loops(self, idx):
        """The logits after each loop, (T, V) each, of the sequence idx (T,)."""
        h, at, out = self.w["wte.weight"][idx], torch.arange(len(idx)), []
        for layer in range(self.cfg.n_layer):
            h = self.layer(h, layer, at, *self.keys_values(h, layer, at))
            if (layer + 1) % (self.cfg.n_layer // self.cfg.n_loop) == 0:
                out.append(self.logits(h))
        return out


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sizes", [dict(n_loop=2), dict(n_loop=3, n_kv_head=2, qk_norm=True), dict(n_loop=1),
                                   dict(n_loop=6, mlp="gelu", pos="none", tie_embeddings=False)], ids=str)
def test_the_model_is_its_equations(sizes, share):
    """Logits and all gradients, with deltas merged into the weights (T=23), and applied beside them."""
    for rank, T in itertools.product((0, 3, FULL), (23, 4)):
        model, x = relaxed(share=share, rank=rank, **sizes), tokens(1, T + 1)
        want, got = ByHand(model).loops(x[0, :-1])[-1], model(x[:, :-1], x[:, 1:])
        assert relative(got[0][0], want) < 1e-10
        ce, parameters = F.cross_entropy(want, x[0, 1:]), list(model.parameters())
        grads = zip(torch.autograd.grad(got[1], parameters), torch.autograd.grad(ce, parameters))
        assert all(relative(a, b, 1e-8) < 1e-10 for a, b in grads)


# ---- what is tied: one tensor ----

PAPER = {"Gemma 2B": (dict(n_layer=18, n_embd=2048, n_head=8, n_kv_head=1, n_mlp=16384, vocab_size=256_000),
                      {1: 1.98, 2: 0.99, 3: 0.66}, 0.52),
         "TinyLlama 1.1B": (dict(n_layer=22, n_embd=2048, n_head=32, n_kv_head=4, n_mlp=5632, vocab_size=32_000,
                                 tie_embeddings=False), {1: 0.97, 2: 0.48}, 0.13),
         "Pythia 1B": (dict(n_layer=16, n_embd=2048, n_head=8, mlp="gelu", vocab_size=50_304, tie_embeddings=False),
                       {1: 0.81, 2: 0.40}, 0.21)}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_of_the_paper(name):
    """Tables 1 and F.1, in billions, without embeddings and of these."""
    shape, billions, embeddings = PAPER[name]
    for n_loop, size in billions.items():
        with torch.device("meta"):
            model = model_relaxed.Model(model_relaxed.Config(**shape, n_loop=n_loop, rank=0))
        of = {n: p.numel() for n, p in model.named_parameters()}
        apart = of["wte.weight"] + of.get("head.weight", 0)
        assert round((sum(of.values()) - apart) / 1e9, 2) == size and round(apart / 1e9, 2) == embeddings


def test_a_checkpoint_holds_each_tied_weight_once(tmp_path, data_dir):
    """Weights, two moments of each, a step count of each (4 bytes), random numbers (5,056 bytes)."""
    trainer = runs.run("relaxed", tmp_path, data_dir, "n_layer=4", "rank=3")
    parameters = list(trainer.model.parameters())
    size = 4 * sum(p.numel() for p in parameters)
    loaded = checkpoint.load_run(tmp_path / "r")[0].state_dict()
    saved = checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["weights"]
    for weights in (trainer.model.state_dict(), saved, loaded):
        storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights.values()}
        assert len(storages) == len(parameters) < len(weights) and sum(storages.values()) == size
    with zipfile.ZipFile(tmp_path / "r" / "ckpt.pt") as z:
        saved = sum(i.file_size for i in z.infolist() if "/data/" in i.filename)
    assert 3 * size <= saved <= 3 * size + 4 * len(parameters) + 5056


# ---- conversion ----

def source(**sizes):
    """A trained model, or what could be one: every norm's weight is anything from 0.5 to 1.5."""
    model = tiny("gpt", **{"n_layer": 6, **sizes})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand_like(p))
    return model


def converted(gpt, **sizes):
    model = model_relaxed.Model(config_like(gpt, **{"rank": FULL, **sizes})).to(gpt.wte.weight.dtype).eval()
    model_relaxed.convert(model, gpt.state_dict())
    return model


def config_like(gpt, **sizes):
    """A Config with a source's sizes."""
    ours = {f.name for f in fields(model_relaxed.Config)}
    return model_relaxed.Config(**{**{k: v for k, v in asdict(gpt.cfg).items() if k in ours}, **sizes})


def matrices(model):
    """(name, stored block k, its part) of all matrices."""
    return [(name, k, part) for k, block in enumerate(model.blocks) for name, part in block.named_modules()
            if name.rsplit(".", 1)[-1] in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")]


def uses(cfg, k):
    """The unrolled layers of stored block k."""
    return [layer for layer in range(cfg.n_layer) if stored(cfg, layer) == f"blocks.{k}"]


@pytest.mark.parametrize("init", ["average", "stepwise", "lower", "upper", "random"])
def test_at_full_rank_the_source_comes_back(init):
    for sizes in ({}, dict(pos="none", mlp="gelu", tie_embeddings=False, n_kv_head=2), dict(qk_norm=True, n_kv_head=1)):
        gpt, x = source(**sizes), tokens(2, 30)
        for share, n_loop in itertools.product(SHARES, (1, 2, 3)):
            assert relative(converted(gpt, init=init, share=share, n_loop=n_loop)(x)[0], gpt(x)[0]) < 1e-8


@pytest.mark.parametrize("init, rank, share", [("average", 1, "cycle"), ("random", 5, "sequence")])
def test_deltas_are_the_best_of_their_rank(init, rank, share):
    """Of W_l diag(g_l / g') - W': the Frobenius error is that of the singular values left out, the spectral error the
    first of them (Eckart and Young)."""
    gpt = source(n_kv_head=2, qk_norm=True)
    model, w = converted(gpt, init=init, rank=rank, share=share, n_loop=3), gpt.state_dict()
    for name, k, part in matrices(model):
        for use, layer in enumerate(uses(model.cfg, k)):
            target = w[f"blocks.{layer}.{name}.weight"]
            norm = {"attn.wo": None, "mlp.w_down": None, "mlp.w_gate": "norm2", "mlp.w_up": "norm2"}.get(name, "norm1")
            if norm:
                target = target * w[f"blocks.{layer}.{norm}.weight"] / getattr(model.blocks[k], norm).weight
            left = (target - part.weight).detach().numpy()
            s = np.linalg.svd(left, compute_uv=False)
            error = left - (part.b[use].T @ part.a[use]).detach().numpy()
            assert abs(np.linalg.norm(error) - np.sqrt((s[rank:] ** 2).sum())) < 1e-10 * s[0]
            assert abs(np.linalg.norm(error, 2) - s[rank]) < 1e-10 * s[0]


@pytest.mark.parametrize("init, exact", [("stepwise", {(0, 0), (2, 1)}), ("average", set())])
def test_where_nothing_is_left_b_is_zero_and_a_can_learn(init, exact):
    """Three blocks in two loops: stepwise takes layers 0, 2 and 5. (stored block, use) whose source is its own."""
    model = converted(source(), init=init, rank=4)
    for name, k, part in matrices(model):
        for use in range(2):
            assert (part.b[use] == 0).all() == ((k, use) in exact)
            assert 0.01 < part.a[use].std() < 0.03 if (k, use) in exact else part.b[use].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rounding_of_a_mean_is_no_delta(dtype):
    """Of three equal layers, their norms equal too: their mean is not theirs to the last bit."""
    gpt = source().to(dtype)
    for layer in range(2, 6):
        gpt.blocks[layer].load_state_dict(gpt.blocks[layer % 2].state_dict())
    model = converted(gpt, n_loop=3, rank=4)
    assert not all(torch.equal(part.weight, gpt.get_parameter(f"blocks.{k}.{name}.weight"))
                   for name, k, part in matrices(model)), "exact means would test nothing"
    for _, _, part in matrices(model):
        assert not part.b.any() and 0.01 < part.a.std() < 0.03


STEPS = {(18, 1): [*range(18)], (18, 2): [0, 2, 4, 6, 8, 11, 13, 15, 17], (18, 3): [0, 3, 7, 10, 14, 17],
         (18, 6): [0, 8, 17], (18, 18): [0], (6, 2): [0, 2, 5], (1, 1): [0]}


def test_which_layers_the_stored_ones_start_from():
    def layers(**sizes):
        cfg = model_relaxed.Config(**sizes)
        return [layer for k in range(cfg.n_stored) for layer in model_relaxed.source_layers(cfg, k)]
    for (L, B), steps in STEPS.items():
        assert layers(n_layer=L, n_loop=B, init="stepwise") == steps
    assert layers(n_layer=6, n_loop=3, init="lower") == [0, 1] and layers(n_layer=6, n_loop=3, init="upper") == [4, 5]


def test_a_norm_near_zero_is_refused_by_name():
    """A mean may vanish where its terms do not; without deltas nothing is divided by it."""
    gpt = source()
    with torch.no_grad():
        gpt.blocks[1].norm2.weight[7], gpt.blocks[4].norm2.weight[7] = 0.9, -0.90001
    with pytest.raises(ValueError, match="norm2 of stored block 1 is near zero"):
        converted(gpt)
    converted(gpt, init="lower"), converted(gpt, rank=0), converted(gpt, lora_init="zero")


def test_deltas_that_start_at_zero():
    """lora_init=zero: the model without deltas, which can learn."""
    gpt, x = source(), tokens(2, 20)
    model, plain = converted(gpt, lora_init="zero", rank=4), converted(gpt, rank=0)
    assert relative(model(x)[0], plain(x)[0]) < 1e-12
    assert all((part.b == 0).all() and 0.015 < part.a.std() < 0.025 for _, _, part in matrices(model))
    assert not [name for name, _ in plain.named_parameters() if name.endswith((".a", ".b"))]


# ---- init_from, through train.py ----

@pytest.fixture(scope="module")
def world(tmp_path_factory, data_dir):
    """Folders of finished runs: gpt with 4 layers, relaxed converted from it, and teachers that do not fit."""
    root = tmp_path_factory.mktemp("relaxed")
    prepare.prepare(prepare.PrepareConfig(dataset=f"file:{data_dir / 'words.txt'}", tokenizer="char",
                                          data_dir=str(root / "data"), name="words"))
    runs.run("gpt", root / "gpt", data_dir, "n_layer=4", "max_steps=20", "learning_rate=1e-2")
    runs.run("relaxed", root / "relaxed", data_dir, "n_layer=4", "rank=4", f"init_from={root / 'gpt' / 'r'}")
    runs.run("gpt", root / "wide", data_dir, "vocab_size=300")
    runs.run("gpt", root / "char", root / "data", "vocab_size=257")
    return root


def refusal(main, argv, monkeypatch, capfd):
    """The one line of an error that ends a program with status 2."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, argv)])
    with pytest.raises(SystemExit) as stop:
        config.run_cli(main)
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("error: "), err
    return err


def evaluated(model, out, data_dir, *extra):
    return train.setup(runs.arguments(model, out, data_dir, "n_layer=4", "eval_only=true", *extra)).evaluate()["val_ce"]


@pytest.mark.parametrize("options", [("n_loop=4", "share=sequence"), ("n_loop=2", "init=stepwise")], ids=str)
def test_converted_by_init_from_it_evaluates_as_the_source(options, world, data_dir, tmp_path):
    start = f"init_from={world / 'gpt' / 'r'}"
    want = evaluated("gpt", tmp_path, data_dir, start)
    assert abs(evaluated("relaxed", tmp_path, data_dir, start, "rank=1000", *options) - want) < 1e-5


@pytest.mark.parametrize("options, message", [
    (["pos=none"], "pos=none, but the checkpoint's model has pos=rope"),
    (["init_from={w}/relaxed/r", "rank=5"], "rank=5, but the checkpoint's model has rank=4"),
    (["init_from={w}/relaxed/r", "share=sequence"], "share=sequence, but the checkpoint's model has"),
    (["model=gpt", "init_from={w}/relaxed/r"], "model=gpt, but the checkpoint holds model=relaxed"),
    (["teacher={w}/wide/r"], "teacher={w}/wide/r has vocab_size=300, the model 257"),
    (["teacher={w}/char/r"], "teacher={w}/char/r was trained with tokenizer char, which is not"),
    (["kd_weight=-1"], "kd_weight=-1.0 must be at least 0")], ids=str)
def test_one_line_and_exit_2(options, message, world, data_dir, tmp_path, monkeypatch, capfd):
    start = [] if any("teacher" in o for o in options) else [f"init_from={world / 'gpt' / 'r'}"]
    options = ["n_layer=4", *(o.format(w=world) for o in options)]
    err = refusal(train.main, runs.arguments("relaxed", tmp_path, data_dir, *start, *options), monkeypatch, capfd)
    assert message.format(w=world) in err and list(tmp_path.iterdir()) == []


def test_a_second_stage_trains_early_exit(world, data_dir, tmp_path):
    trainer = runs.run("relaxed", tmp_path, data_dir, "n_layer=4", "rank=4", f"init_from={world / 'relaxed' / 'r'}",
                       "early_exit=aggressive", "exit_loss=kl", "fill=propagate", "max_steps=2")
    rows = [row for row in plot.read_log(trainer.folder / "log.jsonl") if "ce" in row]
    assert len(rows) == 2 and all({"ce_loop1", "ce"} <= row.keys() and "ce_loop2" not in row for row in rows)


def test_a_hugging_face_model_converts(data_dir, tmp_path):
    """With its sizes: a run that starts from it holds what conversion makes of its model_gpt."""
    saved_llama(tmp_path / "hf", num_hidden_layers=4, vocab_size=257)
    want = converted(llama.from_pretrained(tmp_path / "hf"), block_size=40).state_dict()
    theirs = "n_layer", "n_head", "n_embd", "block_size", "tie_embeddings", "qk_norm"
    argv = runs.arguments("relaxed", tmp_path, data_dir, f"init_from={tmp_path / 'hf'}", f"rank={FULL}")
    trainer = train.setup([*(a for a in argv if not a.startswith(theirs)), "block_size=40"])
    assert checkpoint.fingerprint(dict(trainer.model.state_dict())) == checkpoint.fingerprint(dict(want))
    assert trainer.model.cfg.n_kv_head == 2 and trainer.model.cfg.rope_theta == 1234.0


# ---- distillation ----

@pytest.mark.parametrize("t", [1.0, 2.5])
def test_the_distance_from_the_teacher(t, world, data_dir, tmp_path):
    """t^2 times the mean over counted targets of sum_v p log(p / q), p and q at temperature t."""
    options = "n_layer=4", f"teacher={world / 'gpt' / 'r'}", f"kd_temperature={t}", "ce_weight=0.3", "kd_weight=0.7"
    trainer = train.setup(runs.arguments("relaxed", tmp_path, data_dir, *options))
    trainer.teacher.double()
    x, y, logits = tokens(2, 9, 257), tokens(2, 9, 257, seed=2), torch.randn(2, 9, 257, dtype=torch.float64)
    y[0, 4:] = -1
    p, q = ((z / t).exp() for z in (trainer.teacher(x)[0], logits))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    rows = [(p[b, i] * (p[b, i] / q[b, i]).log()).sum() for b in range(2) for i in range(9) if y[b, i] != -1]
    loss, aux = trainer.distil(x, y, logits, torch.tensor(5.0), {"ce": torch.tensor(4.0)})
    assert len(rows) == 13 and abs(aux["kd"] - t ** 2 * sum(rows) / 13) < 1e-12 and aux["ce"] == 4.0
    assert abs(loss - (0.3 * 5.0 + 0.7 * aux["kd"])) < 1e-12
    assert trainer.distil(x, torch.full_like(y, -1), logits, torch.tensor(0.0), {})[0] == 0


def test_the_teacher_stays_as_it_is_and_out_of_the_checkpoint(world, data_dir, tmp_path):
    """So resuming loads it again: bit-identical."""
    options = [data_dir, "n_layer=4", f"teacher={world / 'gpt' / 'r'}", "eval_interval=4", "early_exit=weighted"]
    whole, alone = runs.run("relaxed", tmp_path / "whole", *options), relaxed(n_layer=4, tie_embeddings=True)
    theirs = checkpoint.load_checkpoint(world / "gpt" / "r" / "ckpt.pt")["weights"]
    assert checkpoint.fingerprint(dict(whole.teacher.state_dict())) == checkpoint.fingerprint(theirs)
    assert not whole.teacher.training and not any(p.requires_grad for p in whole.teacher.parameters())
    assert whole.state()["weights"].keys() == alone.state_dict().keys()
    for k in (1, 4):
        runs.run("relaxed", tmp_path / str(k), *options, stop_after=k)
        resumed = train.setup([f"out_dir={tmp_path / str(k)}", f"data_dir={data_dir}", "run=r", "resume=true"])
        resumed.log.plot = lambda final: None
        assert resumed.teacher is not None and resumed.run() and runs.learned(resumed) == runs.learned(whole)


# ---- early exit ----

COEFFICIENTS = {("weighted", 3): (1 / 6, 2 / 6, 3 / 6), ("aggressive", 2): (0.1, 1), ("aggressive", 3): (0.1, 0.1, 1)}


@pytest.mark.parametrize("exit_loss", ["ce", "kl", "both"])
@pytest.mark.parametrize("early_exit, n_loop", COEFFICIENTS)
def test_the_loss_of_every_loop_counts(early_exit, n_loop, exit_loss):
    """And so does its gradient, in which the distribution that KL is measured from is a constant."""
    model = relaxed(n_loop=n_loop, early_exit=early_exit, exit_loss=exit_loss).train()
    x, y = tokens(2, 12), tokens(2, 12, seed=2)
    y[1, 5:] = -1
    rows = [ByHand(model).loops(row) for row in x]
    ce, kl = torch.zeros(n_loop, dtype=torch.float64), torch.zeros(n_loop, dtype=torch.float64)
    for b in range(n_loop):
        for row, targets in zip(rows, y):
            for i in (targets != -1).nonzero()[:, 0]:
                q, p = row[b][i].softmax(-1), row[-1][i].softmax(-1).detach()
                ce[b] = ce[b] - q[targets[i]].log() / 17
                kl[b] = kl[b] + (p * (p / q).log()).sum() / 17
    earlier = {"ce": ce, "kl": kl, "both": ce + kl}[exit_loss]
    c = COEFFICIENTS[early_exit, n_loop]
    want = sum(c[b] * (ce[b] if b == n_loop - 1 else earlier[b]) for b in range(n_loop))
    _, loss, aux = model(x, y)
    assert abs(loss - want) < 1e-10 and aux.keys() == {"ce", *(f"ce_loop{b}" for b in range(1, n_loop))}
    named = [*(aux[f"ce_loop{b}"] for b in range(1, n_loop)), aux["ce"]]
    assert all(abs(a - b) < 1e-10 for a, b in zip(named, ce, strict=True))
    parameters = list(model.parameters())
    grads = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(want, parameters))
    assert all(relative(a, b) < 1e-10 for a, b in grads)


def test_the_last_loop_does_not_learn_from_the_earlier():
    logits, last = (torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kl = model_relaxed.kl_from_last(logits, last, torch.zeros(2, 5, dtype=torch.long))
    grads = torch.autograd.grad(kl, (logits, last), allow_unused=True)
    assert grads[0].abs().max() > 0 and grads[1] is None


def test_logits_of_every_loop_come_in_pieces_where_they_would_be_many():
    """But for KL, which reads all of them."""
    model, x = relaxed(early_exit="weighted", exit_loss="ce").train(), tokens(2, 12)
    want, parameters = model(x, x), list(model.parameters())
    model.max_logits = 100
    logits, loss, aux = model(x, x)
    assert logits is None and abs(loss - want[1]) < 1e-12 and aux.keys() == want[2].keys()
    grads = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(want[1], parameters))
    assert all(relative(a, b) < 1e-10 for a, b in grads)
    assert relaxed(early_exit="weighted", exit_loss="both").max_logits == math.inf


@pytest.mark.parametrize("b", [1, 2, 3])
def test_exit_loop(b):
    """In eval mode logits and ce are those after that loop, in training the last one's; a cache has as many layers as
    it takes."""
    model, x = relaxed(n_loop=3, exit_loop=b, early_exit="weighted"), tokens(1, 20)
    want = ByHand(model).loops(x[0])
    assert relative(model.train()(x)[0][0], want[-1]) < 1e-10
    for model.training in (False, True):
        cache = model.init_cache(1, 20)
        got = torch.cat([model(part, cache=cache)[0] for part in x.split([14, 1, 1, 4], 1)], 1)
        assert relative(got[0], want[b - 1]) < 1e-10 and model.n_loop == b and len(cache.k) == 2 * b
    logits, loss, aux = model.eval()(x, x)
    assert relative(logits[0], want[b - 1]) < 1e-10 and loss == aux["ce"] and aux.keys() == {"ce"}


# ---- packed tokens of mixed depths, and which code runs ----

class Oneself:
    """A context in which each token attends to its own key alone."""

    def __init__(self):
        self.layers = []

    def attend(self, layer, q, k, v):
        self.layers.append(layer)
        return v.repeat_interleave(q.size(1) // v.size(1), 1)

    def write(self, layer, k, v):
        self.layers.append((layer, k, v))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("sizes", [dict(pos="none", mlp="gelu"), dict(qk_norm=True, n_kv_head=2, rank=0),
                                   dict(qk_norm=True, rank=FULL)], ids=str)
def test_tokens_at_mixed_depths_are_as_if_alone(sizes, fast):
    """Sequences of one token, so that what each attends to is its own key."""
    model, depth = relaxed(n_loop=3, fast=fast, **sizes), torch.tensor([2, 0, 1, 1, 0])
    hand, context, zero = ByHand(model), Oneself(), torch.zeros(1, dtype=torch.long)
    h = torch.randn(5, 32, dtype=torch.float64)
    got = model.loop(h, depth, context)
    for n, d in enumerate(depth.tolist()):
        want = h[n:n + 1]
        for layer in (2 * d, 2 * d + 1):
            want = hand.layer(want, layer, zero, *hand.keys_values(want, layer, zero))
        assert relative(got[n:n + 1], want) < 1e-10
        assert relative(model.loop(h[n:n + 1], depth[n:n + 1], Oneself()), want) < 1e-10
        assert relative(model.logits(model.finish(want, context)), hand.logits(want)) < 1e-10
    assert context.layers == [0, 1]


def test_propagated_keys_are_those_of_the_state():
    """Of each layer of the loop, not rotated: the context does that."""
    model, context = relaxed(n_loop=3, qk_norm=True, n_kv_head=2, pos="none"), Oneself()
    hand, h = ByHand(model), torch.randn(5, 32, dtype=torch.float64)
    model.propagate(h, 2, model.projection(2), context)
    for (layer, k, v), unrolled in zip(context.layers, (4, 5), strict=True):
        want = hand.keys_values(h, unrolled, None)
        assert layer == unrolled - 4
        assert all(relative(ours[0].transpose(0, 1), theirs) < 1e-10 for ours, theirs in zip((k, v), want))


def test_deltas_are_merged_where_tokens_are_many(monkeypatch):
    """As many as make it cheaper: of a matrix (out, in), more than out in / (out + in)."""
    first, addmm = [], torch.addmm                          # the first arguments of all calls
    monkeypatch.setattr(model_relaxed.torch, "addmm", lambda *a: (first.append(a[0]), addmm(*a))[1])
    model = relaxed(n_mlp=32)
    weights = {id(part.weight) for _, _, part in matrices(model)}
    for T, merged in ((100, 42), (17, 42), (16, 0), (1, 0)):
        first.clear()
        model(tokens(1, T))
        assert len(first) == 42 and sum(id(x) in weights for x in first) == merged
    first.clear()
    relaxed(n_mlp=32, fast=False)(tokens(1, 100)), relaxed(n_mlp=32, rank=0)(tokens(1, 100))
    assert first == []


@pytest.mark.parametrize("sizes", [dict(n_loop=3), dict(rank=0, n_kv_head=2, n_loop=2), dict(early_exit="weighted"),
                                   dict(n_loop=6, rank=5, mlp="gelu", tie_embeddings=False)], ids=str)
def test_flops_are_those_that_run(sizes):
    """Forward and backward of the naive path, in training; its scores are of all T keys, the visible ones count."""
    model, x = relaxed(block_size=16, fast=False, pos="none", **sizes).train(), tokens(1, 16)
    with FlopCounterMode(display=False) as counter:
        model(x, x)[1].backward()
    T, C, unseen = 16, 32, 16 * 15 / 2
    assert counter.get_total_flops() - 12 * C * 6 * unseen == T * model.flops_per_token()


@pytest.mark.parametrize("bad, named", [
    (dict(n_loop=4), "n_loop=4 must divide n_layer=6: 1, 2, 3, 6"), (dict(n_loop=0), "n_loop=0"),
    (dict(rank=-1), "rank"), (dict(share="cycle_rev"), "share=cycle_rev"), (dict(exit_loss="mse"), "exit_loss=mse"),
    (dict(exit_loop=-1), "exit_loop=-1"), (dict(exit_weight=-0.1), "exit_weight"), (dict(pos="alibi"), "pos=alibi")])
def test_impossible_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_relaxed.Config(**{"n_layer": 6, "n_embd": 32, **bad})


def test_keys_of_the_model_and_of_the_source_agree():
    """A key that both have means the same: conversion copies it. What the source has alone is retired here."""
    ours, theirs = ({f.name: f.default for f in fields(m.Config)} for m in (model_relaxed, model_gpt))
    assert all(ours[key] == theirs[key] for key in theirs.keys() & ours.keys())
    assert theirs.keys() - ours.keys() == {"window"} and theirs["window"] == model_relaxed.Config.RETIRED["window"]
