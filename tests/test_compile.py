"""Under torch.compile a training step of every model is one graph: no breaks, and no recompilation from step to step
(but one in MoR's warm-up, whose capacities change)."""
import importlib

import pytest
import torch
from torch._dynamo.utils import counters

SIZES = dict(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=16)
LOOPS = dict(share="cycle", n_loop=2)
CASES = [("gpt", {}), ("gpt", dict(pos="alibi", window=5)), ("rt", {}), ("rt", dict(recurrent=False)), ("rat", dict(chunk=4, swa=3)),
         ("lrt", dict(source=2)), ("lrt", dict(memory=False)),
         ("relaxed", dict(n_loop=2, rank=2, early_exit="weighted")),
         ("mor", dict(LOOPS, kv="share", causal="aux_router", capacity_warmup=8)),
         ("mor", dict(LOOPS, router="token", kv="share", balance="loss_free"))]
MORE = [("rat", dict(mixer="rnn")), ("rat", dict(mixer="attention")), ("mor", dict(LOOPS, router="none"))]


def graphs_and_breaks(model, steps=3):
    """How many graphs torch.compile made of some training steps, and its breaks."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(steps):
        model.set_step(step)
        idx = torch.randint(0, model.cfg.vocab_size, (2, 17))
        compiled(idx[:, :-1], idx[:, 1:])[1].backward()
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize("name, changes", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
                         ids=str)
def test_a_training_step_is_one_graph(name, changes):
    module = importlib.import_module(f"model_{name}")
    graphs, breaks = graphs_and_breaks(module.Model(module.Config(**SIZES, **changes)).train())
    if (name, changes) == ("rt", {}):   # its layers are a loop over positions, kept from the compiler on purpose:
        assert (graphs, len(breaks)) == (3, 1)      # before the loop, after it, the loss. So breaks are noticed,
    else:                                           # and by MoR's warm-up recompilations are
        assert (graphs, breaks) == (2 if "capacity_warmup" in changes else 1, {})


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "rt", "lrt", "rat", "relaxed", "mor"])
def test_inductor_trains_it(name):
    """torch's default backend, which compiles for a CPU too: loss and gradients are those without it."""
    torch._dynamo.reset()
    module = importlib.import_module(f"model_{name}")
    model = module.Model(module.Config(**{**SIZES, "n_layer": 8 if name == "mor" else 2})).train()
    idx, found = torch.randint(0, 11, (2, 17)), []
    for step in (model, torch.compile(model)):
        loss = step(idx[:, :-1], idx[:, 1:])[1]
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-5 * (1e-3 + a.norm())
