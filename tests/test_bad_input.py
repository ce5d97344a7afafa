"""Bad input gets exactly one line on stderr that names the thing, exit status 2, no traceback, and leaves every
file as it was."""
import json
import os
import shutil
import subprocess
import sys

import pytest

import bench
import plot
import checkpoint
import config
import eval as evaluation
import prepare
import runs
import sample
import train
from conftest import ROOT
from test_checkpoint import bomb_files

MAINS = {"train": train.main, "sample": sample.main, "bench": bench.main, "plot": plot.main, "eval": evaluation.main}
# text files of the world, by name
FILES = {"broken.yaml": "a: [1, 2", "nested.yaml": "model:\n  size: 3",
         "unknown.yaml": "learning_rat: 0.1", "number.yaml": "sample_prompt: 5",
         "resume.yaml": "resume: true", "empty.txt": "", "afile": "not a folder"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, data_dir):
    """A folder with data/words, a finished run out/r, and things that are broken, each in one way."""
    root = tmp_path_factory.mktemp("world")
    words, out = root / "data" / "words", root / "out"
    shutil.copytree(data_dir / "words", words)
    runs.run("gpt", out, root / "data")
    for name, text in FILES.items():
        (root / name).write_text(text)
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "bombs").mkdir()
    (root / "folder").mkdir()
    bomb_files(root / "bombs", root / "owned")

    meta = json.loads((words / "meta.json").read_text())
    train_bin = (words / "train.bin").read_bytes()
    no_bytes = {**meta["splits"], "val": {**meta["splits"]["val"], "bytes": 0}}
    for name, file, content in (
            ("truncated", "train.bin", train_bin[:-3]), ("outside", "train.bin", b"\xff\x0f" * (len(train_bin) // 2)),
            ("garbage", "meta.json", "{not json"), ("nobytes", "meta.json", {"splits": no_bytes}),
            ("pipebin", "val.bin", None)):
        path = root / "data" / name / file
        shutil.copytree(words, path.parent)
        path.unlink()
        if content is not None:
            content = json.dumps({**meta, **content}) if isinstance(content, dict) else content
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare.prepare(prepare.PrepareConfig(dataset=f"file:{data_dir / 'words.txt'}", tokenizer="char",
                                          data_dir=str(root / "data"), name="othertokenizer"))

    good = (out / "r" / "ckpt.pt").read_bytes()
    state = checkpoint.load_checkpoint(out / "r" / "ckpt.pt")
    for name, change in (("short", good[:len(good) // 2]), ("notokenizer", {"tokenizer": 5}), ("pipe", None),
                         ("nooptimizers", {"optimizers": [{}]}), ("badrng", {"rng": {"cpu": "x"}}),
                         ("badkind", {"tokenizer": {"kind": "char"}})):
        (out / name).mkdir()
        if isinstance(change, bytes):
            (out / name / "ckpt.pt").write_bytes(change)
        elif change:
            checkpoint.save_checkpoint(out / name / "ckpt.pt", {**state, **change})
    for path in ("data/pipebin/val.bin", "out/pipe/ckpt.pt", "pipe"):
        os.mkfifo(root / path)
    return root


LONG = "x" * 300
T = ["out_dir={w}/out", "data_dir={w}/data", "dataset=words", *runs.SMALL[1:]]
# of what typed_config, read_meta and load_checkpoint refuse a few: test_prepare.py and test_checkpoint.py have them all
TRAIN = [
    (["n_layr=3"], "unknown key 'n_layr': did you mean n_layer?"),
    (["run=${oc.env:HOME}"], "run: interpolation is not supported"),
    (["n_embd=30", "n_head=4"], "n_embd=30 is not divisible by n_head=4"),
    (["block_size=1000000"], "block_size=1000000 is too long"),
    (["vocab_size=100"], "vocab_size=100 is less than the data's 257"),
    (["max_steps=0"], "max_steps=0 must be at least 1"),
    (["learning_rate=-1"], "learning_rate=-1.0 must be at least 0"),
    (["beta2=1"], "beta2=1.0 must be at least 0 and at most 0.99999"),
    (["cooldown_frac=2"], "cooldown_frac=2.0 must be at least 0 and at most 1"),
    (["seed=-1"], "seed=-1 must be at least 0"), (["seed=18446744073709551616"], "less than 2^63"),
    (["compile=maybe"], "compile=maybe must be one of"), (["device=tpu9"], "device=tpu9 is not on this machine"),
    (["model=nothing"], "model=nothing is unknown: "), (["run=../escape"], "run '../escape' is not allowed"),
    (["sample_prompt=", "sample_tokens=9"], "sample_prompt is empty"),
    (["out_dir={w}/afile"], "could not write"), ([f"out_dir=a/b/{LONG}/c"], "could not write"),
    (["overwrite=true", "run=r", "wandb=true"], "needs the package wandb"),
    (["run=fresh", "tensorboard=true"], "needs the package tensorboard"),
    # resuming and other checkpoints
    (["run=r"], "holds a checkpoint: resume=true goes on from it"),
    (["resume=true", "overwrite=true", "run=r"], "exclude each other"),
    (["resume=true", "init_from={w}/out/r", "run=r"], "leave out init_from"),
    (["resume=true", "run=never"], "ckpt.pt does not exist"),
    (["resume=true", "run=r", "block_size=8"], "block_size=8, but the checkpoint's model has block_size=16"),
    (["resume=true", "run=r", "optimizer=muon"], "another optimizer"),
    (["model=none", "resume=true", "run=r"], "model=none, but the checkpoint holds model=gpt"),
    (["dataset=othertokenizer", "resume=true", "run=r"], "was trained with tokenizer byte"),
    (["resume=true", "run=short"], "is damaged or is not a checkpoint"),
    (["resume=true", "run=notokenizer"], "notokenizer/ckpt.pt is not a checkpoint of a run: its tokenizer is no dict"),
    (["resume=true", "run=nooptimizers"], "the optimizer's state does not fit"),
    (["resume=true", "run=badrng"], "the checkpoint's rng is wrong"),
    (["resume=true", "run=pipe"], "ckpt.pt is not a regular file"),
    (["init_from={w}/bombs/zip.pt"], "is not a checkpoint"), (["init_from={w}/folder"], "config.json is missing"),
    (["init_from={w}/nowhere"], "neither a folder nor a hub name"), ([f"init_from={LONG}"], "is too long for the name"),
    (["init_from={w}/out/r", "n_layer=3"], "n_layer=3, but the checkpoint's model has n_layer=2"),
    (["model=rat", "init_from=out/r"], "model=rat, but the checkpoint holds model=gpt"),
    (["model=relaxed", "init_from=out/r", "n_layer=4"], "n_layer=4, but the checkpoint's model has n_layer=2"),
    (["teacher=out/none"], "teacher=out/none"), (["teacher=out/notokenizer"], "its tokenizer is no dict"),
    (["teacher=out/r", "kd_temperature=0"], "kd_temperature=0.0 must be at least 0.01 and at most 100"),
    (["teacher=out/r", "block_size=32"], "teacher=out/r takes 16 tokens, block_size=32 is more"),
    # data sets and tasks
    (["dataset=shakespeare"], "python prepare.py dataset=shakespeare tokenizer=byte"),
    (["dataset=nosuch"], "nosuch"), (["dataset=../words"], "words"), (["dataset=file:{w}/empty.txt"], "is empty"),
    (["dataset=file:pipe"], "neither a file nor a folder"),
    ([f"data_dir=a/b/{LONG}/c", "dataset=python"], "cannot write"),
    (["dataset=file:words.txt", f"tokenizer=hf:{LONG}"], "is not allowed: letters, digits"),
    (["dataset=words", "tokenizer=morse", "data_dir={w}/none"], "none"),
    (["dataset=truncated"], "train.bin is truncated"), (["dataset=pipebin"], "val.bin is not a regular file"),
    (["dataset=garbage"], "meta.json"), (["dataset=nobytes"], "splits.val.bytes is missing or wrong"),
    (["dataset=outside"], "out of the vocabulary (257)"),
    (["dataset=task:nothing"], "the tasks are task:recall, "),
    (["dataset=task:recall", "block_size=7"], "block_size=7 is impossible for dataset=task:recall"),
    (["dataset=task:recall", "task_examples=1_000_000_000"], "too many to hold in memory"),
    (["dataset=task:s3", "tokenizer=char"], "leave out tokenizer"),
    (["dataset=task:s3", "vocab_size=5"], "vocab_size=5 is less than the data's 6"),
    (["dataset=task:compression", "init_from={w}/out/r"], "was trained with tokenizer byte"),
    (["dataset=task:s3", "task_next_token=true"], "task_next_token=true is for recall, fuzzy_recall, noisy_recall"),
    # config files
    (["config={w}/missing.yaml"], "missing.yaml cannot be read"), (["config={w}/folder"], "folder cannot be read"),
    (["config={w}/broken.yaml"], "broken.yaml is not valid YAML"), (["config={w}/nested.yaml"], "must hold flat"),
    (["config={w}/unknown.yaml"], "did you mean learning_rate?"),
    (["config={w}/number.yaml"], "sample_prompt: expected str"),
    (["config={w}/resume.yaml", "overwrite=true", "run=r"], "exclude each other"),
    (["config=pipe"], "pipe cannot be read: it is not a regular file"),
    # models
    (["model=rt", "schedule=quick"], "schedule=quick must be one of: auto, naive, tiled, wavefront"),
    (["model=rt", "schedule=wavefront", "block=2"], "schedule=wavefront needs block=1"),
    (["model=rt", "mlp=gelu"], "unknown key 'mlp'"),
    (["model=lrt", "train_path=both"], "train_path=both must be one of: interleaved, chunked, exact"),
    (["model=lrt", "source=5"], "source=5 must name layers from 1 to n_layer=2"),
    (["model=rat", "mixer=lstm"], "mixer=lstm must be one of: rat, rnn, attention"),
    (["model=rat", "reversed=true", "mixer=rnn"], "reversed=true is of mixer=rat"),
    (["model=relaxed", "n_loop=3"], "n_loop=3 must divide n_layer=2: 1, 2"),
    (["model=relaxed", "exit_loop=3"], "exit_loop=3 must be 0 (the last) or one of the 2 loops"),
    (["model=mor", "n_layer=9"], "n_layer=9 does not fit share=middle_cycle with n_loop=3: 8 or 11 would"),
    (["model=mor", "n_layer=5", "router=token", "router_func=tanh"], "router_func=tanh must be one of"),
    (["model=mor", "n_layer=5", "exit_loop=4"], "exit_loop=4 is more than n_loop=3"),
    # more than any machine has
    (["max_flops=-1"], "max_flops=-1.0 must be at least 0"), (["max_flops=1000"], "is less than one step of"),
    (["n_embd=1000000000000", "n_head=2"], "n_embd=1000000000000, vocab_size=1: no machine has memory"),
    (["model=relaxed", "n_layer=9223372036854775807"], "n_loop=2 must divide n_layer=9223372036854775807: 1, 7, "),
    (["model=mor", "n_layer=5", "vocab_size=100000000000"], "vocab_size=100000000000: at least"),
    (["gradient_accumulation_steps=1000000000000"], "gradient_accumulation_steps=1000000000000: at least"),
    (["block_size=9223372036854775807"], "block_size=9223372036854775807"),
    (["model=relaxed", "n_layer=4000000000000", "n_loop=4000000000000"], "n_layer=4000000000000: at least"),
    (["model=rt", "sample_tokens=1000000000000"], "sample_tokens=1000000000000: at least"),
]
SAMPLE = [
    ([], "give one run folder or checkpoint"), (["{w}/out/never"], "never does not exist"),
    (["{w}/out/short"], "is damaged"), (["{w}/bombs/zip.pt"], "is not a checkpoint"),
    (["{w}/out/badkind"], "malformed char tokenizer"), ([LONG], "is too long for the name"),
    (["{w}/out/r", "prompt="], "the prompt is empty"),
    (["{w}/out/r", "prompt=FILE:{w}/missing.txt"], "missing.txt cannot be read"),
    (["{w}/out/r", "prompt=FILE:{w}/empty.txt"], "empty.txt is empty"),
    (["{w}/out/r", "prompt=FILE:{w}/latin.txt"], "latin.txt is not UTF-8"),
    (["{w}/out/r", "prompt=FILE:{w}/pipe"], "pipe cannot be read: it is not a regular file"),
    (["{w}/out/r", "temprature=1"], "did you mean temperature?"),
    (["{w}/out/r", "temperature=-1"], "temperature=-1.0 must be at least 0"),
    (["{w}/out/r", "top_p=1.5"], "top_p=1.5 must be at least 0 and at most 1"),
    (["{w}/out/r", "repetition_penalty=0"], "repetition_penalty=0.0 must be at least 0.01"),
    (["{w}/out/r", "device=quantum"], "device=quantum"),
    (["{w}/out/r", "num_samples=100000000000"], "num_samples=100000000000, max_new_tokens=500: at least"),
    (["{w}/out/r", "max_new_tokens=1000000000000"], "max_new_tokens=1000000000000: at least"),
]
BENCH = [
    (["nothing"], "NAME one of"), (["gpt", "n_layr=1"], "did you mean n_layer?"),
    (["rt", "block_size=1"], "block_size=1: decoding needs at least 2 tokens"),
    (["kernels", "rounds=0"], "rounds=0 must be at least 1"),
    (["kernels", "device=cuda:77"], "device=cuda:77 is not on this machine"),
    (["serve"], "give the folders of runs"), (["serve", "{w}/out/r", "slot=1"], "did you mean slots?"),
    (["serve", "{w}/out/r"], "is a model_gpt: requests are for relaxed and mor"),
    (["serve", "{w}/out/r", "file={w}/a.tune"], "must be a .png"),
]
PLOT = [
    ([], "give the folders of runs"), (["{w}/out/never"], "log.jsonl does not exist"),
    (["{w}/out/r", "y=nothing"], "has no nothing: it has"), (["{w}/out/r", "x=time"], "x=time must be one of"),
    (["{w}/out/r", "labels=a,b"], "as many labels"), (["{w}/out/r", "file={w}/a.tune"], "a.tune"),
    (["{w}/out/r", "file={w}/folder/no/a.png"], "could not write"),
]
EVAL = [
    ([], "give one run folder or checkpoint"), (["{w}/out/never"], "never does not exist"),
    (["{w}/out/short"], "is damaged"), (["{w}/out/r", "task=a"], "did you mean tasks?"),
    (["{w}/out/r", "learning_rate=1"], "unknown key 'learning_rate'"),
    (["{w}/out/r", "n_layer=3"], "n_layer=3, but the checkpoint's model has n_layer=2"),
    (["{w}/out/r", "lengths=1,2"], "lengths=1,2: 32 tokens are more than the 16 that this model reads (block_size=16)"),
    (["{w}/out/r", "lengths=2,3"], "lengths=2,3: each must divide the longest"),
    (["{w}/out/r", "lengths=half"], "lengths=half must be whole numbers: 1,2,4"),
    (["{w}/out/r", "batches=-1"], "batches=-1 must be at least 0"),
    (["{w}/out/r", "batch_size=1000000000000"], "batch_size=1000000000000, block_size=16"),
    (["{w}/out/r", "json={w}/no/a.json"], "no/a.json: there is no such folder"),
    (["{w}/out/r", "json={w}/folder"], "could not write"),
    (["{w}/out/r", "dataset=othertokenizer"], "was trained with tokenizer byte"),
    (["{w}/out/r", "dataset=task:s3"], "dataset=task:s3 is no text"),
]
CASES = [(program, T + args if program == "train" else args, message)
         for program, cases in (("train", TRAIN), ("sample", SAMPLE), ("bench", BENCH), ("plot", PLOT), ("eval", EVAL))
         for args, message in cases]


def snapshot(root):
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in root.rglob("*")}


@pytest.mark.parametrize("program, args, message", CASES,
                         ids=lambda x: ",".join(x[-2:]) if isinstance(x, list) else None)
def test_one_line_and_exit_2(program, args, message, world, capfd, monkeypatch):
    argv = [a.format(w=world) if "${" not in a else a for a in args]
    if program == "train" and not any(a.startswith("run=") for a in argv):
        argv.append("run=fresh")
    monkeypatch.setattr(sys, "argv", [program + ".py", *argv])
    monkeypatch.chdir(world)
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)     # missing, wherever the tests run
    before = snapshot(world)
    with pytest.raises(SystemExit) as stop:
        config.run_cli(MAINS[program])
    out, err = capfd.readouterr()
    assert stop.value.code == 2
    assert err.count("\n") == 1 and err.startswith("error: ") and message in err, err
    assert len(err) < 1500
    after = snapshot(world)
    assert [p for p in after if p not in before] == []
    assert {p: v for p, v in after.items() if p.is_file()} == {p: v for p, v in before.items() if p.is_file()}
    assert not (world / "owned").exists()


@pytest.mark.parametrize("command, message", [
    (["train.py", "n_layr=3"], "did you mean n_layer?"), (["sample.py", "out/never"], "does not exist"),
    (["prepare.py", "tokenizer=morse"], "morse")], ids=lambda x: x[0] if isinstance(x, list) else "")
def test_from_the_shell(command, message, tmp_path):
    p = subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]], cwd=tmp_path, capture_output=True,
                       text=True, timeout=120, env=dict(os.environ))
    assert p.returncode == 2 and p.stdout == "" and p.stderr.count("\n") == 1 and message in p.stderr, p.stderr
    assert list(tmp_path.iterdir()) == []
