"""These tests tie training to an absolute: a step written out, losses that fall, initial scales, and options that have an
effect. (test_train.py tests that resuming, sharding and accumulation are equal to each other.)"""
import copy
import math

import pytest
import torch
from torch import nn

import runs
import train
from common import checkpoint, log, optim
from common.options import TrainConfig, UserError
from conftest import MODELS, ROOT, python, tiny
from model_gpt import RMSNorm
from lab.bench import Counting

models = pytest.mark.parametrize("name", MODELS)


def setup(name, tmp_path, data_dir, *keys):
    return train.setup(runs.arguments(name, tmp_path, data_dir, "dropout=0", *keys))


def logged(run, column):
    return [row[column] for row in checkpoint.read_log(run.folder / "log.jsonl") if column in row]


STEPS, WARMUP, PEAK, MUON, DECAY, CLIP = 10, 3, 0.01, 0.05, 0.2, 0.8


def rate(step):
    """Return the fraction of the peak, which rises linearly over 3 steps and then falls as a cosine from 1 to 0.1 at
    step 10."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


@torch.no_grad()
def plain_muon(p, momentum, lr, decay, mu=0.95):
    """Make a step of one matrix as Jordan et al. write it. But the momentum is a mean, and the decay is AdamW's."""
    momentum.mul_(mu).add_(p.grad, alpha=1 - mu)
    x = (1 - mu) * p.grad + mu * momentum
    x = x.T if p.size(0) > p.size(1) else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if p.size(0) > p.size(1) else x
    p.mul_(1 - lr * decay).sub_(lr * math.sqrt(max(1, p.size(0) / p.size(1))) * x)


@pytest.mark.parametrize("optimizer, stack", [("adamw", optim.STACK), ("muon", optim.STACK), ("muon", 600)])
def test_ten_steps_are_those_of_a_plain_loop(optimizer, stack, tmp_path, data_dir, monkeypatch):
    """gpt in float64 trains as the loop below, by AdamW and by Muon, whose stacks have all matrices of a shape or two
    of 16 x 16. There are two micro-batches, the schedule, clipping, and a decay of matrices and not of vectors."""
    monkeypatch.setattr(optim, "STACK", stack)
    run = setup("gpt", tmp_path, data_dir, f"max_steps={STEPS}", "gradient_accumulation_steps=2", f"warmup_steps={WARMUP}",
                "n_kv_head=1", "lr_schedule=cosine", "min_lr_frac=0.1", f"optimizer={optimizer}", f"learning_rate={PEAK}",
                f"muon_learning_rate={MUON}", f"weight_decay={DECAY}", "beta1=0.8", "beta2=0.93", f"grad_clip={CLIP}")
    run.model.double()
    model = copy.deepcopy(run.model)
    train.train(run)

    in_blocks = [p for p in model.blocks.parameters() if p.dim() == 2] if optimizer == "muon" else []
    others = [p for p in model.parameters() if not any(p is q for q in in_blocks)]
    adamw = torch.optim.AdamW([dict(params=[p for p in others if p.dim() == 2], weight_decay=DECAY),
                               dict(params=[p for p in others if p.dim() == 1], weight_decay=0)], betas=(0.8, 0.93))
    momenta, clipped = [torch.zeros_like(p) for p in in_blocks], 0
    for step in range(STEPS):
        model.zero_grad()
        for i in range(2):
            (model(*run.batches.micro_batch(step, i))[1] / 2).backward()
        clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        for group in adamw.param_groups:
            group["lr"] = PEAK * rate(step)
        adamw.step()
        for p, momentum in zip(in_blocks, momenta):
            plain_muon(p, momentum, MUON * rate(step), DECAY)
    assert 0 < clipped, "no gradient was clipped: the test shows less than it says"
    for (name, ours), theirs in zip(run.model.named_parameters(), model.parameters()):
        assert (ours - theirs).abs().max() < 1e-10, name


def test_a_step_of_56_matrices_is_few_launches():
    """The launches are those of two shapes. torch.optim.Muon has 23 a matrix, 1,288 here."""
    model, x = tiny("gpt", n_layer=8), torch.arange(32).view(2, 16)
    muon = optim.Muon([p for p in model.blocks.parameters() if p.dim() == 2])
    model(x, x)[1].backward()
    muon.step()                 # this step makes the momenta
    with Counting() as counted:
        muon.step()
    assert counted.launches <= 60


def test_frozen_blocks():
    """Muon has nothing to do then."""
    model, x = tiny("gpt"), torch.arange(32).view(2, 16)
    model.blocks.requires_grad_(False)
    before = [p.clone() for p in model.blocks.parameters()]
    model(x, x)[1].backward()
    for optimizer in optim.make_optimizers(model, TrainConfig(optimizer="muon")):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.blocks.parameters()))


def test_a_matrix_may_be_kept_from_muon():
    """A model's parameter_kinds moves parameters between the groups, and all rates stay those of the options."""
    model = tiny("gpt")
    model.parameter_kinds = {"wk": "gate"}
    groups = optim.parameter_groups(model, TrainConfig(optimizer="muon", learning_rate=0.2, muon_learning_rate=0.3))
    assert {(g["optimizer"], g["lr"]) for g in groups} == {("adamw", 0.2), ("muon", 0.3)}
    muon = {id(p) for g in groups if g["optimizer"] == "muon" for p in g["params"]}
    assert [id(block.attn.wk.weight) in muon for block in model.blocks] == [False, False]
    assert all(id(block.attn.wq.weight) in muon for block in model.blocks)


def test_an_optimizer_of_a_fork():
    """No group is left to AdamW, or to no optimizer at all, and moments of another optimizer are refused."""
    model, cfg = tiny("gpt"), TrainConfig()
    adamw = optim.make_optimizers(model, cfg)
    cfg.optimizer = "lion"
    assert {group["optimizer"] for group in optim.parameter_groups(model, cfg)} == {"lion"}
    with pytest.raises(KeyError, match="lion"):
        optim.make_optimizers(model, cfg)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in adamw]
    optim.load_optimizers(adamw, states, 1, TrainConfig())
    older = [{**state, "param_groups": [{"kind" if k == "optimizer" else k: v for k, v in group.items()}
                                        for group in state["param_groups"]]} for state in states]
    optim.load_optimizers(adamw, older, 1, TrainConfig())
    for group in adamw[0].param_groups:
        group["optimizer"] = "lion"
    with pytest.raises(UserError, match="made with another optimizer"):
        optim.load_optimizers(adamw, states, 1, cfg)


def test_a_value_with_a_name_of_the_log_is_refused(tmp_path, data_dir, monkeypatch):
    """OWN_NAMES has all names of a line but those of the model, and three that tasks and teachers add."""
    run = setup("gpt", tmp_path, data_dir, "max_steps=1", "log_interval=1")
    monkeypatch.setattr(run.log, "peak", 1.0)
    train.train(run)
    (line,) = [row for row in checkpoint.read_log(run.folder / "log.jsonl") if "lr" in row]
    assert {*line} == {"ce", *log.OWN_NAMES} - {"kd", "token_accuracy", "sequence_accuracy"}
    monkeypatch.setattr(run, "forward", lambda x, y: (None, run.model(x, y)[1], {"step": torch.ones(())}))
    with pytest.raises(UserError, match="logs 'step', which is a name that the log has already"):
        train.forward_backward(run)


@models
def test_the_loss_falls_by_a_nat(name, tmp_path, data_dir):
    run = runs.run(name, tmp_path, data_dir, "max_steps=60", "learning_rate=1e-2", "n_embd=64", "batch_size=4")
    ce = logged(run, "ce")
    assert ce[-1] < ce[0] - 1
    assert -0.2 <= ce[0] - math.log(257) <= 1, "the first loss is not that of a uniform guess"


def initial_std(name, part, p):
    """Return the standard deviation of an initial matrix of a model with 8 layers and n_embd 128."""
    kind = part.split(".")[-2]
    into_stream = kind in ("wo", "w_down")
    if name == "lrt":       # nanochat's: projections into the residual stream are 0. So are those of gates, which are then 1.
        return dict(wte=1, head=0.001, wo=0, w_down=0, w_gate=0, w_value=0).get(kind, 128 ** -0.5)
    if name == "rt":        # the paper's: projections into the residual stream are smaller the deeper they stand
        return (2 * p.size(1) * (int(part.split(".")[1]) + 1)) ** -0.5 if into_stream else 128 ** -0.5
    return 0.02 / math.sqrt(2 * 8 if into_stream and name != "rat" else 1)


@pytest.mark.parametrize("name", ["gpt", "rt", "lrt", "rat", "relaxed", "mor"])
def test_initial_standard_deviations(name):
    module = __import__(f"model_{name}")
    torch.manual_seed(0)
    model = module.Model(module.Config(n_layer=8, n_embd=128, n_head=4, vocab_size=1000))
    for part, p in model.named_parameters():
        want = initial_std(name, part, p) if p.dim() == 2 else None
        if want is not None:
            assert p.std().item() == pytest.approx(want, rel=0.25 if p.numel() < 2000 else 0.03), part
            assert name != "rt" or p.abs().max() <= 3 * want * (1 + 1e-6), part
        elif name == "lrt":
            assert (p == (1 if part == "alpha" else 0.1)).all(), part
    assert all((m.weight == 1).all() for m in model.modules() if isinstance(m, RMSNorm))
    assert (model.head.weight is model.wte.weight) == (name not in ("rt", "lrt"))


DROPS_WEIGHTS = "gpt", "relaxed", "mor"     # models with dropout on the weights of attention
# RT and its forks drop embeddings alone.
DROPS_BRANCHES = [name for name in MODELS if sum(isinstance(m, nn.Dropout) for m in tiny(name).modules()) > 1]


@pytest.mark.parametrize("name, place", [
    (name, place) for name in MODELS for place in ("wo", "w_down", "embeddings", "weights", "weights, naive")
    if (name in DROPS_BRANCHES or place == "embeddings") and (name in DROPS_WEIGHTS or "weights" not in place)])
def test_dropout_at_one_place_differs_between_micro_batches(name, place, tmp_path, data_dir):
    """Dropout is off but at one place: embeddings, weights of attention, or one branch, while the other branch adds
    nothing. It changes the loss, and the same micro-batch twice in a step has two masks."""
    run = setup(name, tmp_path, data_dir, "dropout=0.4", "gradient_accumulation_steps=2", "learning_rate=0",
                f"fast={'naive' not in place}".lower())
    of_weights, of_embeddings = "weights" in place, place == "embeddings"
    if not of_weights:
        run.model.cfg.dropout = 0.0
    for part, module in run.model.named_modules():
        if isinstance(module, nn.Dropout) and (of_weights or (part == "drop") != of_embeddings):
            module.p = 0.0
    for part, p in run.model.named_parameters():
        p.data = 0 * p if f".{place}." in part else p + 0.1 * torch.randn_like(p)     # LRT's branches start at 0
    micro = run.batches.micro_batch(0, 0)
    run.batches.micro_batch = lambda step, index: micro
    seen, forward = [], run.forward
    run.forward = lambda *batch: seen.append(forward(*batch)[1].item()) or forward(*batch)
    train.train_step(run, [])
    first, second = seen
    without = run.model.eval()(*micro)[1].item()
    assert abs(first - second) > 1e-5 and abs(first - without) > 1e-5


def test_a_seed_decides_weights_and_dropout(tmp_path, data_dir):
    """The losses are those of the same weights and micro-batches, so that dropout alone differs."""
    first, second = (train.setup(runs.arguments("gpt", tmp_path / seed, data_dir, "dropout=0.4", f"seed={seed}"))
                     for seed in "12")
    assert not torch.equal(first.model.wte.weight, second.model.wte.weight)
    second.model.load_state_dict(first.model.state_dict())
    second.batches = first.batches
    assert train.forward_backward(first)["ce"] != train.forward_backward(second)["ce"]


def test_a_models_own_metrics_are_evaluated(tmp_path, data_dir):
    run = setup("mor", tmp_path, data_dir)
    names = {f"val_{name}" for name in run.model.eval_metrics}
    once = train.evaluate(run)
    assert names and names <= once.keys()
    run.model.eval_metrics = ["ce", *run.model.eval_metrics]
    assert train.evaluate(run) == pytest.approx(once)       # a name may come twice


def test_log_interval(tmp_path, data_dir):
    """A run has six steps."""
    for interval, lines in (4, 1), (7, 0):
        run = runs.run("gpt", tmp_path / str(interval), data_dir, f"log_interval={interval}")
        assert len(logged(run, "ce")) == lines


def test_bfloat16_changes_the_loss(tmp_path, data_dir):
    wide, narrow = (logged(runs.run("gpt", tmp_path / dtype, data_dir, "max_steps=1", f"dtype={dtype}"), "ce")[0]
                    for dtype in ("float32", "bfloat16"))
    assert wide != narrow == pytest.approx(wide, rel=1e-2)


def test_tokens_per_second_is_the_clocks(tmp_path, data_dir, monkeypatch):
    """A clock moves by half a second a step, and by ten an evaluation or a save, which are no training time. A step has
    2 x 16 tokens, so that 64 tokens a second are logged."""
    run = setup("gpt", tmp_path, data_dir, "max_steps=5", "eval_interval=2", "keep_interval=3")
    now = [run.log.lap[0]]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    for name, seconds in ("train_step", 0.5), ("evaluate", 10.0), ("save_checkpoint", 10.0):
        def later(*given, function=getattr(train, name), seconds=seconds):
            now[0] += seconds
            return function(*given)
        monkeypatch.setattr(train, name, later)
    train.train(run)
    assert logged(run, "tokens_per_second") == [64.0] * 5


def test_the_readmes_model_is_the_tested_one():
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "tests/forks/model_ut.py").read_text() in readme


@pytest.mark.full
def test_the_first_command_runs_as_it_is_typed(tmp_path):
    """The command has no other option. It prepares the default data set with its tokenizer, and it prints a sample."""
    done = python(ROOT / "train.py", "max_steps=2", f"out_dir={tmp_path / 'out'}", f"data_dir={tmp_path / 'data'}")
    assert done.returncode == 0 and (tmp_path / "out/gpt_tiny/ckpt.pt").exists(), done.stderr
    assert done.stdout.count("-" * 80) == 2
