"""What limits.py counts is what a run really needs, or less."""
import pytest
import torch

import limits
import config
import runs
import train
from conftest import MODELS, SIZES


@pytest.mark.parametrize("name", MODELS)
def test_a_run_needs_what_is_counted(name, tmp_path, data_dir, monkeypatch):
    """Weights, gradients and moments to the byte; the tensors kept for the backward at least."""
    parts = {}
    monkeypatch.setattr(limits, "check_fits", lambda more, device="cpu": parts.update(more))
    optimizer = "muon" if name == "lrt" else "adamw"
    trainer = train.setup(runs.arguments(name, tmp_path, data_dir, f"optimizer={optimizer}"))
    kept, params = {}, list(trainer.model.parameters())

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.model(*trainer.batches.micro_batch(0, 0))[1].backward()
    for o in trainer.optimizers:
        o.step()
    states = [x for o in trainer.optimizers for state in o.state.values() for x in state.values() if x.dim()]
    (weights,) = [n for what, n in parts.items() if what.startswith("n_layer") and "vocab_size=257" in what]
    (activations,) = [n for what, n in parts.items() if what.startswith("batch_size") and "vocab_size=257" in what]
    needed = sum(x.nbytes for x in params + [p.grad for p in params] + states)
    assert weights == needed if optimizer == "adamw" else 0.7 * needed < weights <= needed
    own = {p.untyped_storage().data_ptr() for p in params}
    assert 0 < activations <= sum(x.untyped_storage().nbytes() for where, x in kept.items() if where not in own)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_model(name):
    module = config.model_module(name)
    cfg = module.Config(**SIZES.get(name, {}))
    model, before = module.Model(cfg), torch.get_rng_state()
    blank = limits.shapes_only(module.Model, cfg)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in blank.parameters())
    assert [(n, p.shape) for n, p in blank.state_dict().items()] == [(n, p.shape) for n, p in model.state_dict().items()]
    assert blank.init_cache(3, 40).nbytes() == model.init_cache(3, 40).nbytes()


def test_the_line_names_what_is_needed_and_what_is_there(monkeypatch):
    monkeypatch.setattr(limits, "memory_of", lambda device: 2e9)
    limits.check_fits({"a": 10 ** 9, "b": 10 ** 9})
    with pytest.raises(limits.UserError, match="^b: at least 2.5 GB of memory would be needed, cpu has 2 GB$"):
        limits.check_fits({"a": 10 ** 9, "b": 15 * 10 ** 8})
