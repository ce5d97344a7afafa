"""Two processes with fsdp=true compute what one process computes, and write the same checkpoints."""
import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path

from common import checkpoint
from common.options import UserError
from common.sharded import shard
import runs
import train
from conftest import MODELS

OPTIONS = ["gradient_accumulation_steps=4", "optimizer=muon", "muon_learning_rate=0.02", "eval_interval=3",
           "eval_batches=3"]    # two processes cannot share them equally
OTHERS = {"rt": ["schedule=tiled"], "lrt": ["projections=layerwise"], "relaxed": ["rank=4"], "mor": ["router=token"]}


def sharded(model, folder, data_dir, *extra):
    """Return the checkpoint and what was printed."""
    argv = runs.arguments(model, folder, data_dir, *OPTIONS, "fsdp=true", *extra)
    codes, told = runs.two_ranks(folder.parent, argv)
    assert codes == [0, 0], told
    return checkpoint.load_checkpoint(folder / "r" / "ckpt.pt"), told[0]


def assert_alike(ours, theirs, tolerance=2e-5):
    """Compare weights and moments of two checkpoints, relative to the largest number of each tensor. Sums in another
    order differ by 1e-7, and Adam makes more of that where a gradient is almost 0."""
    for part in ("weights", "optimizers"):
        pairs = zip(*(tree_flatten_with_path(of[part])[0] for of in (ours, theirs)), strict=True)
        for (path, a), (other, b) in pairs:
            assert path == other and type(a) is type(b), path
            if torch.is_tensor(a):
                assert a.dtype == b.dtype and (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3), path


@pytest.mark.parametrize("model, extra", [
    *(pytest.param(m, [], id=m, marks=() if m in ("gpt", "lrt") else pytest.mark.full) for m in MODELS),
    *(pytest.param(m, keys, id=f"{m}-{keys[0]}", marks=pytest.mark.full) for m, keys in OTHERS.items())])
def test_two_sharded_processes_are_one(model, extra, data_dir, tmp_path):
    """Weights, moments and losses are the same. Then each goes on from the other's checkpoint."""
    one = runs.run(model, tmp_path / "one", data_dir, *OPTIONS, *extra)
    two, out = sharded(model, tmp_path / "two", data_dir, "sample_tokens=3", *extra)
    assert "2 processes" in out and "-" * 80 in out
    assert_alike(two, train.state(one))
    logs = [checkpoint.read_log(tmp_path / n / "r" / "log.jsonl") for n in ("one", "two")]
    for key in ("ce", "grad_norm", "val_ce"):
        ours, theirs = ([row[key] for row in log if key in row] for log in logs)
        assert len(ours) == len(theirs) > 0 and ours == pytest.approx(theirs, rel=2e-5)
    on = ["max_steps=8", "resume=true", *extra]
    two, _ = sharded(model, tmp_path / "one", data_dir, *on)
    one = runs.run(model, tmp_path / "two", data_dir, *OPTIONS, "fsdp=false", *on)
    assert two["step"] == 8
    assert_alike(two, train.state(one), 1e-4)


def test_a_parameter_without_dimensions_is_told():
    model = torch.nn.Linear(2, 2)
    model.mix = torch.nn.Parameter(torch.zeros(()))
    with pytest.raises(UserError, match="cannot shard mix, which has no dimension"):
        shard(model, [], torch.device("cpu"), 2)
