"""Checkpoints are not lost by a kill at any moment, nor by a full disk. Damaged and hostile files are refused."""
import contextlib
import hashlib
import io
import os
import pickle
import random
import resource
import signal
import zipfile

import numpy as np
import pytest
import torch

from common import checkpoint, options
import runs
import train
from common.options import UserError, unlock


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_dir):
    """Return the fingerprint of an uninterrupted run. (Saving is the same for all models.)"""
    return finish(tmp_path_factory.mktemp("whole"), data_dir)


def child(out, data_dir, *more, die_at=None):
    argv = runs.arguments("gpt", out, data_dir, "max_steps=8", "eval_interval=2", *more)
    return runs.fork(runs.main_in_child, argv, die_at)


def finish(out, data_dir, *more):
    """Resume or start until the run is done, and return the fingerprint that it ends with."""
    p = child(out, data_dir, *more, *["resume=true"] * (out / "r" / "ckpt.pt").exists())
    p.join()
    assert p.exitcode == 0
    assert not list(out.rglob("*.tmp"))
    return runs.learned(checkpoint.load_checkpoint(out / "r" / "ckpt.pt"))


def test_kill_at_random_moments(tmp_path, data_dir, pytestconfig):
    rng, progress, long = random.Random(0), set(), "max_steps=20"
    whole = finish(tmp_path / "whole", data_dir, long)
    for n in range(50 if pytestconfig.getoption("full") else 4):
        out = tmp_path / str(n)
        file = out / "r" / "ckpt.pt"
        runs.kill_after(2 * n % 9, child(out, data_dir, long), file, rng)
        if file.exists():
            progress.add(checkpoint.load_checkpoint(file)["step"])  # the file is whole, whenever the process was killed
        assert finish(out, data_dir, long) == whole
    assert len(progress) > 2, "the kills did not fall into the run"


@pytest.mark.parametrize("die_at", [
    pytest.param((call, n), marks=[pytest.mark.full] * (n < 4), id=f"{call}-{n}") for n in (1, 2, 4) for call in
    ("save", "save!", "fsync", "fsync!", "replace", "replace!", "sync_folder", "sync_folder!")])
def test_kill_inside_saving(whole, tmp_path, data_dir, die_at):
    """The process is killed just before and just after each system call of a save, in several saves."""
    p = child(tmp_path, data_dir, die_at=die_at)
    p.join()
    assert p.exitcode == -signal.SIGKILL
    if die_at[1] > 2:
        assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] >= 2
    assert finish(tmp_path, data_dir) == whole


def test_order_of_a_save(tmp_path, monkeypatch):
    """SIGKILL does not test fsync, so that the order of the calls is looked at. The file reaches the disk before it
    takes its place, and the folder reaches it after."""
    order, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: order.append("folder" if os.path.isdir(fd) else "file"))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    checkpoint.save_checkpoint(tmp_path / "c.pt", {"x": torch.ones(3)})
    assert order == ["file", "replace", "folder"] and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory, data_dir):
    """Return the bytes of a small checkpoint and the fingerprint of its contents."""
    out = tmp_path_factory.mktemp("sound")
    path = runs.run("gpt", out, data_dir, "n_layer=1", "n_embd=4", "n_head=1", "block_size=4").folder / "ckpt.pt"
    checkpoint.save_checkpoint(path, {**checkpoint.load_checkpoint(path), "optimizers": []})
    return path.read_bytes(), runs.fingerprint(checkpoint.load_checkpoint(path))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_checkpoints_are_refused(damage, sound, tmp_path):
    """A flip is also noticed in the zip's directory, which its own checksums do not cover, and in our checksum."""
    data, rng, path = sound[0], random.Random(1), tmp_path / "c.pt"
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        directory = range(z.start_dir, len(data))
    places = {"cut": [0, 1, 31, 32, len(data) - 1, *rng.choices(range(len(data)), k=45)],
              "flip": [*rng.choices(range(len(data)), k=100), *directory]}[damage]
    for i in places:
        flipped = bytes([data[i] ^ 1 << rng.randrange(8)])
        path.write_bytes(data[:i] if damage == "cut" else data[:i] + flipped + data[i + 1:])
        with pytest.raises(UserError, match="is damaged"):
            checkpoint.load_checkpoint(path)


def test_a_sound_file_is_not_called_damaged_where_memory_is_short(sound, tmp_path, monkeypatch):
    def full(*args, **more):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    (tmp_path / "a.pt").write_bytes(sound[0])
    ckpt = checkpoint.load_checkpoint(tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", full)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", full)
    for call in (lambda: checkpoint.load_checkpoint(tmp_path / "a.pt")), lambda: checkpoint.build_model(ckpt):
        with pytest.raises(RuntimeError, match="allocate") as told:
            call()
        assert options.in_one_line(told.value).startswith("not enough memory: ")


def test_whole_files_that_no_run_saves(sound, tmp_path, capsys):
    """These files have right checksums around other contents, and each is refused in one line. An option that the model
    does not have is dropped."""
    (tmp_path / "a.pt").write_bytes(sound[0])

    def saved(change):
        state = checkpoint.load_checkpoint(tmp_path / "a.pt")
        change(state)
        checkpoint.save_checkpoint(tmp_path / "b.pt", state)
        return tmp_path / "b.pt"
    for change in (*(lambda s, name=name: s.pop(name) for name in checkpoint.FIELDS),
                   *(lambda s, name=name: s.update({name: None}) for name in checkpoint.FIELDS)):
        with pytest.raises(UserError, match="b.pt is damaged or is not a checkpoint of this project"):
            checkpoint.load_checkpoint(saved(change))
    for change in (lambda s: s.update(model="nothing"), lambda s: s["model_config"].update(n_embd="x")):
        with pytest.raises(UserError, match="b.pt cannot be loaded: "):
            checkpoint.load_checkpoint(saved(change))
    with pytest.raises(UserError, match="does not fit model_gpt.py"):
        checkpoint.load_run(saved(lambda s: s["weights"].update({"norm.weight": torch.ones(5)})))
    old = saved(lambda s: (s["model_config"].update(bias=True), s.update(rng={"cpu": torch.get_rng_state()})))
    state = checkpoint.load_checkpoint(old)
    del state["rng"]                # older checkpoints have it
    assert runs.fingerprint(state) == sound[1]
    assert f"note: {old}: bias=True is dropped" in capsys.readouterr().err


def test_hostile_and_foreign_files_are_refused_and_run_nothing(tmp_path):
    """The files are bombs, weights of others, and text. They are refused also with the right checksum, because it is no
    secret."""
    target = tmp_path / "owned"

    class Bomb:
        def __reduce__(self):
            return open, (str(target), "w")
    bomb = Bomb()
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(bomb))
    torch.save(bomb, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"model": bomb}, tmp_path / "zip.pt")
    torch.save({"model": torch.ones(3)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    for file in [*tmp_path.glob("*.pt")]:
        data, signed = file.read_bytes(), tmp_path / f"signed_{file.name}"
        signed.write_bytes(data + hashlib.sha256(data).digest())
        for path in file, signed:
            with pytest.raises(UserError, match="is not a checkpoint"):
                checkpoint.load_checkpoint(path)
            assert not target.exists()
    pickle.loads((tmp_path / "plain.pt").read_bytes()).close()
    assert target.exists(), "the bomb is a dud: the test shows nothing"


def broken(*given):
    raise OSError(28, "No space left on device")


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_an_older_run_is_replaced_as_a_whole(tmp_path, data_dir, monkeypatch):
    """Its files stay if overwrite=true ends in the trial micro-batch. Then they all go, the log and step_*.pt too, but no
    file of the user's."""
    old = runs.run("gpt", tmp_path, data_dir, "eval_interval=2", "keep_interval=2")
    (old.folder / "curves.png").write_bytes(b"picture")
    (old.folder / "notes.tmp").write_text("a user's own")
    (old.folder / "ckpt.pt.tmp").write_text("half written")
    before = contents(old.folder)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(train, "micro_step", broken)
        runs.run("gpt", tmp_path, data_dir, "overwrite=true")
    assert contents(old.folder) == before
    new = runs.run("gpt", tmp_path, data_dir, "overwrite=true", "keep_interval=4", "seed=5", stop_after=5)
    assert [row["step"] for row in checkpoint.read_log(new.folder / "log.jsonl")] == [1, 2, 3, 4, 5]
    assert contents(new.folder).keys() == {"ckpt.pt", "step_4.pt", "log.jsonl", "notes.tmp"}
    assert checkpoint.load_checkpoint(new.folder)["config"]["seed"] == 5


@pytest.mark.parametrize("n", [1, 2])
def test_a_kill_while_an_older_run_is_removed(n, tmp_path, data_dir):
    """What is left of it is refused, so that no run goes on from a part of it."""
    runs.run("gpt", tmp_path, data_dir, "eval_interval=2", "keep_interval=2", "max_steps=4")
    p = child(tmp_path, data_dir, "overwrite=true", die_at=("unlink!", n))
    p.join()
    assert p.exitcode == -signal.SIGKILL
    with pytest.raises(UserError, match="best.pt is a checkpoint: init_from= takes its weights|step_2.pt is"):
        train.setup(runs.arguments("gpt", tmp_path, data_dir, "resume=auto"))


def test_a_step_that_could_not_be_kept_is_kept_later(tmp_path, data_dir, monkeypatch):
    keys = "gpt", tmp_path, data_dir, "keep_interval=2", "eval_interval=2"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(train, "save_checkpoint", lambda path, state, save=train.save_checkpoint:
                      broken() if path.name == "step_4.pt" else save(path, state))
        runs.run(*keys)
    options.unlock(tmp_path / "r")
    assert checkpoint.load_checkpoint(tmp_path / "r")["evaluated"] == 4
    runs.run(*keys, "resume=true")
    assert checkpoint.load_checkpoint(tmp_path / "r" / "step_4.pt")["step"] == 4


@pytest.mark.parametrize("dies, files", [(3, {"ckpt.pt", "step_2.pt"}), (5, {"ckpt.pt", "step_2.pt", "step_4.pt"})])
def test_a_run_that_dies_between_evaluations(dies, files, tmp_path, data_dir, monkeypatch):
    """It goes on from its last kept step, or from its last evaluation. Each evaluation has one line of the log, also
    where it has no val_ce."""
    def deadly(run, whole=train.forward_backward):
        return whole(run) if run.step != dies else broken()
    monkeypatch.setattr(train, "evaluate", lambda run: {"val_ce": float("nan"), "val_ce_estimate": 1.0})
    keys = "gpt", tmp_path, data_dir, "keep_interval=2", "eval_interval=3"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(train, "forward_backward", deadly)
        runs.run(*keys)
    folder = tmp_path / "r"
    unlock(folder)
    assert contents(folder).keys() == {*files, "log.jsonl"}
    assert checkpoint.load_checkpoint(folder)["step"] == dies - (dies == 5)
    assert runs.run(*keys, "resume=true").step == 6
    rows = checkpoint.read_log(folder / "log.jsonl")
    assert [row["step"] for row in rows if "val_ce_estimate" in row] == [3, 6]
    assert [row["step"] for row in rows if "lr" in row] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.load_checkpoint(folder / "step_4.pt")["step"] == 4
    last = checkpoint.load_checkpoint(folder / "step_6.pt")
    assert last["step"] == last["evaluated"] == 6       # a longer run that starts here has its evaluation


def test_a_run_that_has_saved_meanwhile_is_not_resumed(tmp_path, data_dir, monkeypatch):
    """The run saves once more after a second job has read its checkpoint."""
    run = runs.run("gpt", tmp_path, data_dir)

    def read_and_wait(start, load=train.load_start):
        ckpt = load(start)
        checkpoint.save_checkpoint(run.folder / "ckpt.pt", {**train.state(run), "tokens": 1})
        return ckpt
    monkeypatch.setattr(train, "load_start", read_and_wait)
    with pytest.raises(UserError, match="another run has saved there meanwhile"):
        train.setup(runs.arguments("gpt", tmp_path, data_dir, "resume=auto"))
    options.unlock(run.folder)


@pytest.mark.parametrize("resumed, other_saves", [(False, True), (True, True), (False, False)])
def test_a_run_stops_if_another_saves_in_its_folder(resumed, other_saves, tmp_path, data_dir, monkeypatch):
    """It may be on another machine, if the file system has no locks between machines. A user may remove ckpt.pt."""
    def step(run, signals, step=train.train_step):
        if run.step == 3:
            (run.folder / "ckpt.pt").unlink()
            if other_saves:
                checkpoint.save_checkpoint(run.folder / "ckpt.pt", {**train.state(run), "step": 99})
        return step(run, signals)
    keys = "gpt", tmp_path, data_dir, f"eval_interval={100 if resumed else 2}"
    if resumed:
        runs.run(*keys, "max_steps=2")
    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(UserError, match="another run has saved there") if other_saves else contextlib.nullcontext():
        runs.run(*keys, "resume=auto")
    unlock(tmp_path / "r")
    assert checkpoint.load_checkpoint(tmp_path / "r")["step"] == (99 if other_saves else 6)


def test_a_state_that_could_not_be_read_is_not_written(tmp_path):
    checkpoint.save_checkpoint(tmp_path / "x.pt", {"step": 1})
    before = (tmp_path / "x.pt").read_bytes()
    for value, message in (np.sqrt(2.0), "the state holds a numpy.*scalar, and may hold nothing but "), (lambda: 0, ".*lambda"):
        with pytest.raises(UserError, match=f"could not save .*x.pt: {message}.* untouched"):
            checkpoint.save_checkpoint(tmp_path / "x.pt", {"step": 2, "scale": value})
    assert (tmp_path / "x.pt").read_bytes() == before and [*tmp_path.iterdir()] == [tmp_path / "x.pt"]


def test_full_disk_leaves_the_last_checkpoint(tmp_path, data_dir, monkeypatch):
    def limited(path, state, save=train.save_checkpoint):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000 if state["step"] >= 4 else before[0], before[1]))
        try:
            save(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(train, "save_checkpoint", limited)
    with pytest.raises(UserError, match="could not save .* untouched"):
        runs.run("gpt", tmp_path, data_dir, "eval_interval=2")
    monkeypatch.undo()
    unlock(tmp_path / "r")
    assert not list(tmp_path.rglob("*.tmp"))
    assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] == 2
    assert runs.run("gpt", tmp_path, data_dir, "resume=true").step == 6
