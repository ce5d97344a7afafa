"""The trainer: resuming, schedules, optimizers, logs, signals, several processes."""
import contextlib
import importlib.machinery
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch

import checkpoint
import data
import llama
import model_gpt
import optim
import plot
from run import TrainConfig, make_model
import runs
import train
from conftest import MODELS, ROOT
from config import UserError
from data import TokenData

models = pytest.mark.parametrize("name", MODELS)


def test_muon_runs_in_float32_on_a_cpu(monkeypatch):
    """The update is torch's to about the rounding of bfloat16, the state torch's own; other devices are left alone."""
    start, kinds, found, addmm = torch.randn(24, 40), [], [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda x, *args, **more: kinds.append(x.dtype) or addmm(x, *args, **more))
    for cls in (torch.optim.Muon, optim.Muon):
        p = torch.nn.Parameter(start.clone())
        p.grad = torch.sin(100 * start)
        optimizer = cls([p], lr=0.1, weight_decay=0.0)
        optimizer.step()
        found.append((p.detach() - start, optimizer.state_dict()))
    (theirs, their_state), (ours, our_state) = found
    assert 0 < (ours - theirs).norm() < 0.02 * theirs.norm()
    assert checkpoint.fingerprint(our_state) == checkpoint.fingerprint(their_state)
    assert set(kinds[:len(kinds) // 2]) == {torch.bfloat16} and set(kinds[len(kinds) // 2:]) == {torch.float32}
    with optim.KeepFloat32():
        assert torch.ones(2, device="meta").bfloat16().dtype == torch.bfloat16


RESUMED = [*(pytest.param(name, "adamw", [], id=name) for name in MODELS),
           *(pytest.param(name, "muon", [], marks=[pytest.mark.full] * (name != "gpt"), id=f"{name}-muon")
             for name in MODELS),
           *(pytest.param("gpt", "adamw", [f"dataset=task:{task}", "task_examples=30"], id=task)
             for task in ("recall", "compression")),
           pytest.param("gpt", "adamw", ["dataset=task:s3", "task_examples=0"], id="s3"),
           pytest.param("mor", "adamw", ["capacity_warmup=4"], id="warm-up"),
           pytest.param("mor", "adamw", ["router=token", "balance=loss_free", "max_steps=5"], id="biases")]


@pytest.mark.parametrize("name, optimizer, more", RESUMED)
def test_resume_at_every_step_is_bit_identical(name, optimizer, more, tmp_path, data_dir):
    """With other data or state that a step changes: in the middle."""
    options = [f"optimizer={optimizer}", "eval_interval=4", *more]
    whole = runs.run(name, tmp_path / "whole", data_dir, *options)
    assert "balance=loss_free" not in more or whole.model.balance_bias.any()
    for k in [3] if more else range(1, 6):
        stopped = runs.run(name, tmp_path / str(k), data_dir, *options, stop_after=k)
        assert stopped.step == k
        resumed = runs.run(name, tmp_path / str(k), data_dir, *options, "resume=true")
        assert resumed.step == whole.step and runs.learned(resumed) == runs.learned(whole)
        for file in ("ckpt.pt", "best.pt"):
            ours, theirs = (checkpoint.load_checkpoint(t.folder / file) for t in (resumed, whole))
            assert runs.learned(ours) == runs.learned(theirs)


@pytest.mark.parametrize("name, dataset", [*((name, "words") for name in MODELS), ("gpt", "task:recall")])
def test_evaluation_changes_no_weight(name, dataset, tmp_path, data_dir):
    """Nor do they change in the checkpoint that load_run reads, shared ones shared again."""
    often = runs.run(name, tmp_path / "a", data_dir, f"dataset={dataset}", "eval_interval=1")
    never = runs.run(name, tmp_path / "b", data_dir, f"dataset={dataset}", "eval_interval=50")
    assert checkpoint.fingerprint(often.state()["weights"]) == checkpoint.fingerprint(never.state()["weights"])
    model, _, ckpt = checkpoint.load_run(often.folder)
    assert ckpt["step"] == 6 and sum(p.numel() for p in model.parameters()) == \
        sum(p.numel() for p in often.model.parameters())
    storages = [len({p.data_ptr() for p in m.state_dict().values()}) for m in (model, often.model)]
    assert storages[0] == storages[1]
    x = torch.randint(0, model.cfg.vocab_size, (1, 16))
    assert torch.equal(model(x)[0], often.model.eval()(x)[0])


@pytest.mark.parametrize("dataset", ["words", "task:recall"])
def test_gradients_are_averaged_once_a_step(dataset, tmp_path, data_dir, monkeypatch):
    """Of two processes with three micro-batches each, the last one's backward pass synchronizes."""
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir, f"dataset={dataset}",
                                         "gradient_accumulation_steps=6"))
    synced, model = [True], trainer.model

    @contextlib.contextmanager
    def no_sync():
        synced[0] = False
        yield
        synced[0] = True
    found = []
    trainer.forward = lambda x, y: (found.append(synced[0]), model(x, y))[1]
    trainer.forward.no_sync = no_sync
    monkeypatch.setattr(trainer.procs, "world", 2)
    monkeypatch.setattr(trainer.procs, "sum", lambda *values: list(map(float, values)))
    trainer.train_step(types.SimpleNamespace(asked=False))
    assert found == [False, False, True]


def test_validation_reads_every_token_once(data_dir):
    batches = data.TextBatches(data_dir / "words", TrainConfig(batch_size=3), 16)
    tokens = TokenData(data_dir / "words", "val")
    seen = torch.cat([batches.cut(batches.val, starts)[1].flatten() for starts in batches.val_batches(0)])
    text = torch.from_numpy(tokens.windows(np.array([0]), tokens.tokens)[0])
    assert tokens.tokens - 1 - len(seen) < 16 and torch.equal(seen, text[1:len(seen) + 1])
    limited = batches.val_batches(4)
    assert sum(map(len, limited)) == 12 and limited[-1][-1] > 0.9 * len(seen) and limited[0][0] == 0


@models
def test_accumulation_is_one_large_batch(name, tmp_path, data_dir, monkeypatch):
    """The same eight sequences in one, two or eight micro-batches move the weights alike: their losses count tokens, of
    which each sequence has another number. (MoR's losses of routing are means over sequences: all have as many.) In
    float64: a recurrent model amplifies float32's rounding, which differs with the batch."""
    results, make, original = [], make_model, data.TextBatches.micro_batch

    def moved(*args):           # zero-initialised projections would leave most gradients zero
        model = make(*args).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        return model

    def masked(self, step, index):
        x, y = original(self, step, index)
        row = torch.arange(len(x))[:, None] + index * len(x)
        return x, y.masked_fill((torch.arange(16) > 2 * row) & (name != "mor"), -1)
    monkeypatch.setattr(train, "make_model", moved)
    monkeypatch.setattr(data.TextBatches, "micro_batch", masked)
    for rows, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer = runs.run(name, tmp_path / str(rows), data_dir, f"batch_size={rows}", "dropout=0.0", "max_steps=1",
                           f"gradient_accumulation_steps={accumulation}", "beta1=0", "beta2=0")
        results.append({n: o["exp_avg"] for n, o in enumerate(trainer.optimizers[0].state_dict()["state"].values())})
    for other in results[1:]:
        for n, gradient in results[0].items():
            assert torch.linalg.norm(gradient - other[n]) <= 1e-13 * torch.linalg.norm(gradient)
    assert sum(g.abs().max() > 0 for g in results[0].values()) > len(results[0]) / 2


# what a changed key does on resume ---------------------------------------------------------------------------

def test_resume_keeps_the_runs_settings_and_a_changed_key_holds(tmp_path, data_dir):
    runs.run("gpt", tmp_path, data_dir, "weight_decay=0.1", "learning_rate=0.123", stop_after=3)
    argv = [f"out_dir={tmp_path}", f"data_dir={data_dir}", "run=r", "resume=true", "device=cpu"]
    trainer = train.setup(argv)
    assert trainer.cfg.learning_rate == 0.123 and trainer.cfg.max_steps == 6 and trainer.model.cfg.n_embd == 16
    assert trainer.step == 3
    trainer = train.setup([*argv, "weight_decay=0.05", "learning_rate=0.5", "max_steps=9"])
    assert trainer.run() and trainer.step == 9
    assert {g["weight_decay"] for g in trainer.optimizers[0].param_groups} == {0.05, 0.0}
    assert {g["peak_lr"] for g in trainer.optimizers[0].param_groups} == {0.5}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_an_evaluation_is_never_skipped(stop, tmp_path, data_dir, monkeypatch):
    """Stopped just where an evaluation was due, a run makes up for it when resumed: the same best, one line each, of
    steps too, where a killed run got further than its checkpoint. A worse checkpoint does not replace the best."""
    values = {2: 1.0, 4: 3.0, 6: 2.0}
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: {"val_ce": values[self.step], "val_bpb": 1.0})
    whole = runs.run("gpt", tmp_path / "a", data_dir, "eval_interval=2")
    runs.run("gpt", tmp_path / "b", data_dir, "eval_interval=2", stop_after=stop)
    with open(tmp_path / "b" / "r" / "log.jsonl", "a") as f:
        f.write(json.dumps({"step": stop + 1, "tokens": 1, "seconds": 1e6, "ce": 1.0}) + '\n{"step": 6, "tok')
    resumed = runs.run("gpt", tmp_path / "b", data_dir, "resume=true", "eval_interval=2")
    again = runs.run("gpt", tmp_path / "b", data_dir, "resume=true", "eval_interval=2")     # nothing is left to do
    for trainer in (resumed, again):
        assert runs.learned(trainer) == runs.learned(whole) and trainer.best_ce == 1.0
        assert checkpoint.load_checkpoint(trainer.folder / "best.pt")["step"] == 2
        rows = plot.read_log(trainer.folder / "log.jsonl")
        assert [[r["step"] for r in rows if key in r] for key in ("ce", "val_ce")] == [[1, 2, 3, 4, 5, 6], [2, 4, 6]]
        assert all(a["seconds"] <= b["seconds"] for a, b in zip(rows, rows[1:])) and rows[-1]["seconds"] < 1e5


def test_a_file_named_on_resume_does_not_undo_the_command_line(tmp_path, data_dir, capsys):
    (tmp_path / "x.yaml").write_text("max_steps: 3\ninit_from: nowhere\nlog_interval: 1\n")
    argv = [a for a in runs.arguments("gpt", tmp_path, data_dir, f"config={tmp_path / 'x.yaml'}", "init_from=")
            if not a.startswith("log_interval")]
    assert train.setup(argv).run()                                              # max_steps=6, from the command line
    capsys.readouterr()
    short = [f"config={tmp_path / 'x.yaml'}", f"out_dir={tmp_path}", "run=r", "resume=true", "device=cpu"]
    trainer = train.setup(short)
    assert trainer.cfg.max_steps == 6 and trainer.step == 6 and trainer.cfg.init_from == ""
    assert "max_steps=6 is the run's own and stays; the file has 3" in capsys.readouterr().out
    assert train.setup([*short[:-2], "eval_only=true", "device=cpu"]).step == 6     # not init_from of the file


def test_last_state_is_saved_before_the_last_evaluation(tmp_path, data_dir, monkeypatch):
    def broken(self):
        raise RuntimeError("evaluation broke")
    monkeypatch.setattr(train.Trainer, "evaluate", broken)
    with pytest.raises(RuntimeError):
        runs.run("gpt", tmp_path, data_dir)
    assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] == 6


def test_finetuning_starts_from_the_weights(tmp_path, data_dir):
    """The sizes are theirs; a file that was named may change block_size and dropout."""
    first = runs.run("gpt", tmp_path / "a", data_dir)
    (tmp_path / "long.yaml").write_text("block_size: 32\ndropout: 0.25\n")
    start = [f"init_from={tmp_path / 'a' / 'r'}", f"out_dir={tmp_path}", f"data_dir={data_dir}", "dataset=words",
             "device=cpu", "max_steps=1", "batch_size=2", "sample_tokens=0"]
    second = train.setup([*start, "run=b"])
    assert second.model.cfg == first.model.cfg and second.step == 0
    assert second.optimizers[0].state_dict()["state"] == {}
    assert checkpoint.fingerprint(second.state()["weights"]) == checkpoint.fingerprint(first.state()["weights"])
    assert second.run()
    fields = train.setup([*start, "run=c", f"config={tmp_path / 'long.yaml'}"]).model.cfg
    assert fields.block_size == 32 and fields.dropout == 0.25 and fields.n_embd == 16


def test_finetuning_from_a_hugging_face_folder(tmp_path, data_dir):
    torch.manual_seed(5)
    source = model_gpt.Model(model_gpt.Config(vocab_size=300, n_layer=1, n_head=2, n_embd=16, block_size=64))
    llama.to_pretrained(source, tmp_path / "hf")
    argv = [a for a in runs.arguments("gpt", tmp_path, data_dir, f"init_from={tmp_path / 'hf'}")
            if not a.startswith(("n_embd", "n_layer", "n_head"))]
    trainer = train.setup(argv)
    assert trainer.model.cfg.vocab_size == 300 and trainer.model.cfg.block_size == 16
    assert torch.equal(trainer.model.wte.weight, source.wte.weight) and trainer.run()


def test_eval_only_writes_nothing(tmp_path, data_dir, capsys):
    """It says what the run's own evaluation said, also at another length."""
    runs.run("gpt", tmp_path, data_dir, "pos=alibi")
    result = plot.read_log(tmp_path / "r" / "log.jsonl")[-1]["val_ce"]
    files = lambda: {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}
    before, argv = files(), [f"out_dir={tmp_path}", "run=r", "eval_only=true", f"data_dir={data_dir}"]
    capsys.readouterr()
    train.main(argv)
    assert files() == before and f"val ce {result:.4f}" in capsys.readouterr().out
    train.main([*argv, "block_size=64"])
    assert "val ce" in capsys.readouterr().out
    trainer, seen = train.setup(argv), []
    trainer.model.set_step = seen.append
    trainer.evaluate()
    assert seen == [6], "what depends on the step is evaluated as it was trained"


# schedules, optimizers, logs -----------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, factors", [
    ("cosine", {0: 0.1, 9: 1.0, 9 + 91 / 2: 0.55, 100: 0.1}), ("linear", {0: 1.0, 50: 1.0, 75: 0.55, 100: 0.1}),
    ("trapezoid", {0: 0.1, 30: 1.0, 75: 0.55, 100: 0.1})])
def test_schedules_by_hand(schedule, factors):
    cfg = TrainConfig(max_steps=100, warmup_steps=9, min_lr_frac=0.1, cooldown_frac=0.5, lr_schedule=schedule)
    for step, factor in factors.items():
        assert abs(optim.lr_factor(step, cfg) - factor) < 1e-12


def test_the_log(tmp_path, data_dir):
    """The gradient's norm is logged as it was before it was clipped."""
    trainer = runs.run("gpt", tmp_path, data_dir, "eval_interval=2", "grad_clip=1e-3", "beta1=0", draw=True)
    rows = [json.loads(line) for line in (trainer.folder / "log.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "ce" in r]
    evaluations = [r for r in rows if "val_ce" in r]
    assert [r["step"] for r in steps] == list(range(1, 7)) and [r["step"] for r in evaluations] == [2, 4, 6]
    assert all(r["tokens"] == 32 * r["step"] for r in rows)
    assert {"ce", "bpb", "lr", "grad_norm", "tokens_per_second", "seconds"} <= steps[0].keys()
    assert rows[-1]["flops"] == pytest.approx(6 * 32 * trainer.model.flops_per_token())
    moments = [s["exp_avg"] for s in trainer.optimizers[0].state_dict()["state"].values()]
    assert abs(torch.cat([x.flatten() for x in moments]).norm() - 1e-3) < 1e-5 and steps[-1]["grad_norm"] > 0.1
    meta = trainer.batches.val
    want = evaluations[0]["val_ce"] / math.log(2) * meta.tokens / meta.bytes
    assert abs(evaluations[0]["val_bpb"] - want) < 1e-9
    assert (trainer.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_switches_for_other_loggers(tmp_path, data_dir, monkeypatch):
    """wandb and TensorBoard get what log.jsonl gets (stand-ins with their interface)."""
    rows, scalars = [], []
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["wandb"].init = lambda **k: types.SimpleNamespace(log=lambda values, step: rows.append((step, values)))
    sys.modules["torch.utils.tensorboard"].SummaryWriter = lambda folder: types.SimpleNamespace(
        add_scalar=lambda key, value, step: scalars.append((step, key, value)), flush=lambda: None)
    trainer = runs.run("gpt", tmp_path, data_dir, "wandb=true", "tensorboard=true")
    logged = plot.read_log(trainer.folder / "log.jsonl")
    assert [step for step, _ in rows] == [r["step"] for r in logged]
    assert all(values.items() <= r.items() for (_, values), r in zip(rows, logged))
    assert len(scalars) == sum(len(values) for _, values in rows)


# things that go wrong -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path, data_dir, monkeypatch, bad):
    original = model_gpt.cross_entropy
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir, "eval_interval=2"))
    monkeypatch.setattr(model_gpt, "cross_entropy", lambda a, b: original(a, b) * (
        bad if trainer.step == 3 and trainer.model.training else 1))
    with pytest.raises(UserError, match="at step 3: stopped before the update"):
        trainer.run()
    saved = checkpoint.load_checkpoint(trainer.folder / "ckpt.pt")
    assert trainer.step == 3 and saved["step"] == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_gradient_that_is_not_finite_stops_too(tmp_path, data_dir):
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir))
    trainer.model.wte.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(UserError, match="grad_norm is .* at step 0"):
        trainer.run()


def start(*command, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


def wait_for(path, seconds=60):
    end = time.time() + seconds
    while not path.exists():
        assert time.time() < end, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_saves_and_exits_0(tmp_path, data_dir, sig):
    p = start("train.py", *runs.arguments("gpt", tmp_path, data_dir, "max_steps=1000000", "eval_interval=5"))
    wait_for(tmp_path / "r" / "ckpt.pt")
    p.send_signal(sig)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0, err
    step = checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"]
    assert f"stopped at step {step}" in out and "Traceback" not in err
    assert plot.read_log(tmp_path / "r" / "log.jsonl")[-1]["step"] == step


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


@pytest.mark.parametrize("name, more", [
    ("gpt", []), ("gpt", ["dataset=task:s3", "task_examples=0", "learning_rate=1e-2"]),
    ("mor", ["router=token", "balance=loss_free", "balance_rate=2e-3", "max_steps=7"])], ids=["gpt", "task", "mor"])
def test_two_processes_are_one_with_twice_the_accumulation(name, more, tmp_path, data_dir):
    """Bit for bit: the same two micro-batches, accumulated by one process or shared by two. So are the biases that the
    loads of MoR's recursions move, and accuracies are those of all tokens."""
    options = ["gradient_accumulation_steps=2", "eval_interval=3", "eval_batches=3", *more]
    one = runs.run(name, tmp_path / "one", data_dir, *options)
    p = start(*TORCHRUN, *runs.arguments(name, tmp_path / "two", data_dir, *options))
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    two = checkpoint.load_checkpoint(tmp_path / "two" / "r" / "ckpt.pt")
    assert "2 processes" in out and two["step"] == one.step
    assert checkpoint.fingerprint(two["weights"]) == checkpoint.fingerprint(one.state()["weights"])
    assert name == "gpt" or one.model.balance_bias.any()
    rows = [plot.read_log(tmp_path / n / "r" / "log.jsonl") for n in ("one", "two")]
    told = [[v for row in log for k, v in row.items() if k == "ce" or "accuracy" in k] for log in rows]
    assert told[0] == pytest.approx(told[1], rel=1e-6, abs=1e-7)
    assert len(told[0]) == one.step + (2 * 8 if "dataset=task:s3" in more else 0)


NAN_AT_3 = """
import os, sys, config, train, model_gpt
original, setup = model_gpt.cross_entropy, train.setup
def poisoned(argv):
    trainer = setup(argv)
    model_gpt.cross_entropy = lambda a, b: original(a, b) * (
        float('nan') if trainer.step == 3 and trainer.procs.rank == 1 and trainer.model.training else 1)
    return trainer
def main(argv):
    try:
        train.main(argv)
    except config.UserError as e:
        open(sys.argv[0] + os.environ["RANK"], "w").write(str(e))
        raise
train.setup = poisoned
config.run_cli(main)
"""


def test_every_process_stops_at_a_nan_in_one(tmp_path, data_dir):
    (tmp_path / "poisoned.py").write_text(NAN_AT_3)
    p = start(*TORCHRUN[:-1], str(tmp_path / "poisoned.py"),
              *runs.arguments("gpt", tmp_path, data_dir, "gradient_accumulation_steps=2", "eval_interval=2"),
              PYTHONPATH=str(ROOT))
    _, err = p.communicate(timeout=120)
    assert p.returncode != 0
    for rank in "01":
        assert "at step 3: stopped before the update" in (tmp_path / f"poisoned.py{rank}").read_text()
    assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] == 2
    assert err.count("error: ce is nan at step 3") == 2


def test_a_killed_process_ends_the_job(tmp_path, data_dir):
    p = start(*TORCHRUN, *runs.arguments("gpt", tmp_path, data_dir, "gradient_accumulation_steps=2",
                                         "max_steps=1000000", "eval_interval=5"))
    wait_for(tmp_path / "r" / "ckpt.pt")
    children = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    p.communicate(timeout=90)       # torchrun waits 30 s for a process that hangs in a collective, then kills it
    assert p.returncode != 0
    assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] % 5 == 0


@pytest.mark.gpu
@models
def test_trains_compiled_on_cuda(name, tmp_path, data_dir):
    argv = [a for a in runs.arguments(name, tmp_path, data_dir, "max_steps=60", "learning_rate=1e-2", "n_embd=64")
            if not a.startswith(("device=", "compile="))]
    trainer = train.setup(argv)
    assert trainer.procs.device.type == "cuda" and trainer.run()
    losses = [row["ce"] for row in plot.read_log(trainer.folder / "log.jsonl") if "ce" in row]
    assert losses[-1] < losses[0] - 1
