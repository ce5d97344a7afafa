"""Muon treats stacks of matrices as it treats each matrix alone, in few launches."""
import math

import pytest
import torch

from common import optim
from common.options import TrainConfig
from conftest import tiny
from lab.bench import Counting
from test_models import tokens


def gpt(dtype, **sizes):
    """Return a model, and a Muon of its matrices: square, wide and tall ones."""
    model = tiny("gpt", **sizes).to(dtype)
    return model, next(o for o in optim.make_optimizers(model, TrainConfig(optimizer="muon")) if isinstance(o, optim.Muon))


def set_gradients(model, step):
    x = tokens(2, 17, seed=step)
    model.zero_grad()
    model(x[:, :-1], x[:, 1:])[1].backward()


@torch.no_grad()
def plain_muon(p, momentum, lr, decay=0.1, mu=0.95):
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


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("stack", [optim.STACK, 3000])      # a stack of 3000 holds two of 32 x 32
def test_stacks_are_matrix_by_matrix(stack, dtype, tolerance, monkeypatch):
    """Weights and momenta agree after five steps, which have different rates. torch.optim.Muon can load the state."""
    monkeypatch.setattr(optim, "STACK", stack)
    (model, muon), (plain, _) = gpt(dtype, n_kv_head=2), gpt(dtype, n_kv_head=2)
    group, = muon.param_groups
    of_muon = {id(p) for p in group["params"]}
    matrices = [(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters()) if id(ours) in of_muon]
    momenta = [torch.zeros_like(ours) for ours, _ in matrices]
    for step in range(5):
        for each in model, plain:
            set_gradients(each, step)
        group["lr"] = 0.02 / (step + 1)
        muon.step()
        for (_, theirs), momentum in zip(matrices, momenta):
            plain_muon(theirs, momentum, group["lr"])
    assert len({ours.shape for ours, _ in matrices}) == 4 and len(matrices) == 14
    for (ours, theirs), momentum in zip(matrices, momenta):
        assert (ours - theirs).abs().max() < tolerance
        assert (muon.state[ours]["momentum_buffer"] - momentum).abs().max() < tolerance
    torch.optim.Muon(group["params"]).load_state_dict(muon.state_dict())


def test_a_step_of_56_matrices_is_few_launches():
    """The launches are those of two shapes. torch.optim.Muon has 23 a matrix, 1,288 here."""
    model, muon = gpt(torch.float32, n_layer=8)
    set_gradients(model, 0)
    muon.step()                 # this step makes the momenta
    with Counting() as counted:
        muon.step()
    assert len(muon.param_groups[0]["params"]) == 56 and counted.launches <= 60


def test_frozen_blocks():
    model, muon = gpt(torch.float32)
    model.blocks.requires_grad_(False)
    before = [p.clone() for p in model.blocks.parameters()]
    set_gradients(model, 0)
    muon.step()
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
