"""model_relaxed computes what its unrolled layers compute. The tests also look at what is tied, at conversion, at
distillation, and at early exit."""
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

import model_relaxed
from common import checkpoint, huggingface
import runs
import train
from common.options import UserError, as_weights_of, merge
from conftest import relative, tiny
from test_models import assert_cache_is_forward, tokens

FULL = 1000         # a rank that no matrix here reaches


def relaxed(**sizes):
    return tiny("relaxed", **{"n_layer": 6, "rank": 3, **sizes})


@pytest.mark.parametrize("rank", [0, 3, FULL])
@pytest.mark.parametrize("sizes", [dict(n_loop=2), dict(n_loop=3, n_kv_head=2, qk_norm=True), dict(n_loop=1),
                                   dict(n_loop=6, mlp="gelu", pos="none", tie_embeddings=False)], ids=str)
def test_the_model_is_its_equations(sizes, rank):
    """It is the model_gpt that has W' + B A of each use in a layer of its own. (test_export.py compares with
    transformers.)"""
    model, x = relaxed(rank=rank, **sizes), tokens(2, 23)
    assert relative(model(x)[0], huggingface.unrolled(model)(x)[0]) < 1e-10


def converted(gpt, **sizes):
    """Return a model of the source's sizes that starts from it."""
    same = {k: v for k, v in asdict(gpt.cfg).items() if k in model_relaxed.Config.__dataclass_fields__}
    model = model_relaxed.Model(model_relaxed.Config(**{**same, "rank": FULL, **sizes})).to(gpt.wte.weight.dtype).eval()
    model_relaxed.convert(model, gpt.state_dict())
    return model


def linears(model):
    return [part for part in model.modules() if isinstance(part, model_relaxed.RelaxedLinear)]


@pytest.mark.parametrize("init", ["average", "stepwise", "lower", "upper", "random"])
def test_at_full_rank_the_source_comes_back(init):
    for n_loop, sizes in (
            (3, {}), (2, dict(pos="none", mlp="gelu", tie_embeddings=False, n_kv_head=2)),
            (3, dict(qk_norm=True, n_kv_head=1)), (2, dict(qk_norm=True)),
            (1, dict(n_kv_head=1, head_dim=6, mlp="geglu", scale_embeddings=True))):     # Gemma
        gpt, x = tiny("gpt", n_layer=6, **sizes), tokens(2, 30)
        assert relative(converted(gpt, init=init, n_loop=n_loop)(x)[0], gpt(x)[0]) < 1e-10


def test_which_layers_the_stored_ones_start_from():
    for init, L, n_loop, layers in (("stepwise", 18, 2, [0, 2, 4, 6, 8, 11, 13, 15, 17]), ("upper", 6, 3, [4, 5])):
        cfg = model_relaxed.Config(n_layer=L, n_loop=n_loop, init=init)
        assert [layer for k in range(cfg.n_stored) for layer in model_relaxed.layers_for_stored(cfg, k)] == layers


def test_at_rank_0_qk_norms_are_tied_too():
    """Each tied norm is the mean of its layers' norms, as all tied weights are means."""
    gpt = tiny("gpt", n_layer=6, qk_norm=True)
    model = converted(gpt, rank=0, n_loop=3)
    for k, block in enumerate(model.blocks):
        mean = sum(gpt.blocks[layer].attn.q_norm.weight for layer in (k, k + 2, k + 4)) / 3
        assert len({id(w) for w in block.attn.q_norm.weights}) == 1 and len(block.attn.q_norm.weights) == 3
        assert relative(block.attn.q_norm.weights[2], mean) < 1e-14


@pytest.mark.parametrize("layers, taken", [(3, [0, 0, 1, 1, 2, 2]), (11, [0, 2, 4, 6, 8, 10])])
def test_a_source_of_other_numbers_of_layers_is_taken_evenly(layers, taken):
    weights = {f"blocks.{layer}.w": layer for layer in range(layers)}
    assert [source["w"] for source in model_relaxed.source_layers(weights, 6)] == taken


def test_a_norm_of_heads_keeps_the_dtype():
    """Its input is in 16 bits under autocast, and its weight is not."""
    norm = model_relaxed.HeadNorm(tiny("relaxed").cfg)
    x = torch.randn(2, 3, 5, norm.weights[0].numel())
    found = norm.float()(x.bfloat16(), 0)
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), norm(x, 0), rtol=0.02, atol=0.02)


def test_a_norm_near_zero_is_refused_by_name():
    """A mean may vanish where its terms do not. Deltas that start at zero are not divided by it, and they can learn."""
    gpt, x = tiny("gpt", n_layer=6), tokens(2, 20)
    with torch.no_grad():
        gpt.blocks[1].norm2.weight[7], gpt.blocks[4].norm2.weight[7] = 0.9, -0.90001
    with pytest.raises(ValueError, match="norm2 of stored block 1 is near zero"):
        converted(gpt)
    model, plain = converted(gpt, lora_init="zero", rank=4), converted(gpt, rank=0)
    assert relative(model(x)[0], plain(x)[0]) < 1e-12 and all(part.a.all() for part in linears(model))


def test_converted_by_init_from(tmp_path, data_dir):
    """A conversion at full rank is the source, with all its settings."""
    source = runs.run("gpt", tmp_path, data_dir, "n_layer=4", "max_steps=2", "rope_theta=10").folder
    _, fields, ckpt = merge(dict(model="relaxed", init_from=str(source), rank="1000", n_loop="4"), checkpoint.load_start)
    ours, theirs = checkpoint.build_model(ckpt, **fields), checkpoint.load_run(source)[0]
    assert relative(ours.eval()(x := tokens(2, 9))[0], theirs(x)[0]) < 1e-5


@pytest.mark.parametrize("model", ["relaxed", "mor"])
def test_a_source_with_an_option_that_the_model_has_not_is_refused(model):
    with pytest.raises(UserError, match=f"window=16, which model={model} has not"):
        as_weights_of(model, {"model": "gpt", "model_config": {"window": 16, "n_embd": 16}})


def test_the_distance_from_the_teacher():
    """It is the mean over counted targets of sum_v p log(p / q), and it is added to the loss."""
    teacher, x, y, logits = tiny("gpt"), tokens(2, 9), tokens(2, 9, seed=2), torch.randn(2, 9, 61, dtype=torch.float64)
    y[0, 4:] = -1
    p, q = (z[y != -1].softmax(-1) for z in (teacher(x)[0], logits))
    kd = (p * (p / q).log()).sum(-1).mean()
    loss, aux = train.distil(teacher, x, y, logits, torch.tensor(5.0), {"ce": torch.tensor(4.0)})
    assert abs(aux["kd"] - kd) < 1e-12 and abs(loss - (5 + kd)) < 1e-12 and aux["ce"] == 4
    assert train.distil(teacher, x, torch.full_like(y, -1), logits, torch.tensor(0.0), {})[0] == 0


def test_the_teacher_stays_as_it_is_and_out_of_the_checkpoint(data_dir, tmp_path):
    """It teaches a second stage, early exit, which may be stopped and resumed."""
    gpt = runs.run("gpt", tmp_path / "gpt", data_dir, "n_layer=4", "max_steps=20", "learning_rate=1e-2").folder
    first = runs.run("relaxed", tmp_path / "first", data_dir, "n_layer=4", "rank=4", f"init_from={gpt}").folder
    options = [data_dir, "n_layer=4", "rank=4", f"init_from={first}", "early_exit=aggressive", "exit_loss=kl",
               f"teacher={gpt}"]
    whole = runs.run("relaxed", tmp_path / "whole", *options)
    assert {"ce_loop1", "ce", "kd"} <= checkpoint.read_log(whole.folder / "log.jsonl")[0].keys()
    theirs = checkpoint.load_checkpoint(gpt / "ckpt.pt")["weights"]
    assert runs.fingerprint(dict(whole.teacher.state_dict())) == runs.fingerprint(theirs)
    runs.run("relaxed", tmp_path, *options, stop_after=2)
    assert runs.learned(runs.run("relaxed", tmp_path, *options[:3], "resume=true")) == runs.learned(whole)
    assert not whole.teacher.training and train.state(whole)["weights"].keys() == whole.model.state_dict().keys()


@pytest.mark.parametrize("early_exit, exit_loss, weights", [
    ("weighted", "ce", (1 / 6, 2 / 6, 3 / 6)), ("aggressive", "kl", (0.1, 1)), ("aggressive", "both", (0.1, 0.1, 1))])
def test_the_loss_of_every_loop_counts_and_the_last_does_not_learn_from_the_earlier(early_exit, exit_loss, weights):
    """The distribution that KL is measured from is a constant."""
    n_loop = len(weights)
    model = relaxed(n_loop=n_loop, early_exit=early_exit, exit_loss=exit_loss).train()
    x, y = tokens(2, 12), tokens(2, 12, seed=2)
    y[1, 5:] = -1
    logits = [model.head(model.norm(h))[y != -1] for h in model.loop_states(x)]
    ce, last = [F.cross_entropy(z, y[y != -1]) for z in logits], logits[-1].detach().softmax(-1)
    kl = [(last * (last / z.softmax(-1)).log()).sum(-1).mean() for z in logits]
    earlier = {"ce": ce, "kl": kl, "both": [a + b for a, b in zip(ce, kl)]}[exit_loss]
    want = sum(c * loss for c, loss in zip(weights, [*earlier[:-1], ce[-1]], strict=True))
    _, loss, aux = model(x, y)
    named = [*(aux.pop(f"ce_loop{b}") for b in range(1, n_loop)), aux.pop("ce")]
    assert abs(loss - want) < 1e-10 and not aux and all(abs(a - b) < 1e-10 for a, b in zip(named, ce, strict=True))
    grads = (torch.autograd.grad(z, list(model.parameters())) for z in (loss, want))
    assert all(relative(a, b, 1e-8) < 1e-10 for a, b in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="for a call with a cache"):
        model(x, y, n_valid=torch.tensor([12, 5]))


@pytest.mark.parametrize("b", [1, 2])
def test_exit_loop(b):
    """In eval mode the logits, ce and the layers of a cache are those of so many loops."""
    model, x = relaxed(n_loop=3, exit_loop=b, early_exit="weighted"), tokens(1, 20)
    assert relative(model.train()(x)[0], relaxed(n_loop=3)(x)[0]) < 1e-10
    logits, loss, aux = model.eval()(x, x)
    assert relative(logits, huggingface.unrolled(model)(x)[0]) < 1e-10 and loss == aux["ce"] and aux.keys() == {"ce"}
    assert_cache_is_forward(model, [20], [14, 1, 1, 4], 1e-10)
    assert len(model.init_cache(1, 20).k) == 2 * b
