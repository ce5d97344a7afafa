"""What limits.py counts is what a run really needs, or less."""
import pytest
import torch

from common import limits
import runs
import train
from conftest import MODELS


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
    weights, activations = ([n for what, n in parts.items() if what.startswith(start) and "vocab_size=257" in what][0]
                            for start in ("n_layer", "batch_size"))
    needed = sum(x.nbytes for x in params + [p.grad for p in params] + states)
    assert weights == needed if optimizer == "adamw" else 0.7 * needed < weights <= needed
    own = {p.untyped_storage().data_ptr() for p in params}
    assert 0 < activations <= sum(x.untyped_storage().nbytes() for where, x in kept.items() if where not in own)
