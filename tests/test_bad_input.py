"""Bad input ends a program with status 2. There is exactly one line on stderr, which names the thing, and no traceback.
Every file stays as it was."""
import multiprocessing.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from common import checkpoint, options
from lab import bench, eval as evaluation
import prepare
import runs
import sample
import serve
import train
from common.options import TrainConfig, UserError, merge
from conftest import ROOT, TORCHRUN, python, snapshot

# the text files of the world, by name
FILES = {"broken.yaml": "a: [1, 2", "resume.yaml": "resume: true", "number.yaml": "model: 5", "true.yaml": "seed: true",
         "unnamed.yaml": "1: 2", "large.yaml": "grad_clip: 1" + "0" * 400, "empty.txt": "",
         "sixty.yaml": "keep_interval: 1:30", "twice.yaml": "seed: 1\nseed: 2", "afile": "not a folder",
         "home.yaml": "teacher: ~nobody_of_this_name/out", "ä.txt": "some text, " * 20, "ö.txt": "other"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, data_dir):
    """Return a folder with data/words, a finished run out/r, and things that are broken, each in one way."""
    root = tmp_path_factory.mktemp("world")
    out = root / "out"
    shutil.copytree(data_dir / "words", root / "data" / "words")
    runs.run("gpt", out, root / "data")
    runs.run("relaxed", out, root / "data", "run=relaxed", "max_steps=1")
    for name, text in FILES.items():
        (root / name).write_text(text)
    (root / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("folder", "out/badstate", "out/pipe", "out/best"):
        (root / name).mkdir()
    (out / "best" / "log.jsonl").touch()
    for text, tokenizer, name in (data_dir / "words.txt", "char", "othertokenizer"), (root / "ä.txt", "byte", ""):
        prepare.prepare(prepare.PrepareConfig(f"file:{text}", tokenizer, str(root / "data"), name=name))
    state = checkpoint.load_checkpoint(out / "r" / "ckpt.pt")
    checkpoint.save_checkpoint(out / "badstate" / "ckpt.pt", {**state, "optimizers": ["x"]})
    checkpoint.save_checkpoint(out / "best" / "best.pt", state)
    for path in ("out/pipe/ckpt.pt", "pipe"):
        os.mkfifo(root / path)
    return root


T = ["out_dir=out", "data_dir=data", "dataset=words", *runs.SMALL[1:]]
# If one guard refuses many inputs, one or two of them are here.
TRAIN = [
    (["n_layr=3"], "unknown option 'n_layr': did you mean n_layer?"), (["run=../escape"], "run '../escape' is not allowed"),
    (["config=unnamed.yaml"], "unknown option '1' of config=unnamed.yaml for model=gpt"),
    (["block_size=1000000"], "block_size=1000000 is too long"),
    (["beta2=1"], "beta2=1.0 must be at least 0 and at most 0.99999"),
    (["vocab_size=100"], "vocab_size=100 is less than the data's 257"), (["compile=maybe"], "compile=maybe must be one of"),
    (["device=tpu9"], "device=tpu9 cannot be used: "), (["model=nothing"], "model=nothing is unknown: the models are gpt, "),
    (["fsdp=true"], "needs several processes: torchrun"), (["out_dir=afile"], "afile/fresh: Not a directory"),
    (["max_flops=1000"], "max_flops sets max_steps: give one of the two"), (["-n_layer=3"], "no dashes here: n_layer=3"),
    (["configs/rt_tiny.yaml"], "argument 'configs/rt_tiny.yaml' is not of the form option=value, such as config=FILE.yaml"),
    # resuming and other checkpoints
    (["run=r"], "ckpt.pt is a checkpoint: resume=true goes on from it"),
    (["resume=true", "run=never"], "never/ckpt.pt: No such file"),
    (["run=best"], "best.pt is a checkpoint: init_from= takes its weights"),
    (["init_from=out/best"], "this run has no last checkpoint, but init_from=out/best/best.pt may be given"),
    (["resume=true", "run=r", "n_embd=32"], "n_embd=32 does not fit the checkpoint, whose model has n_embd=16"),
    (["resume=true", "run=r", "optimizer=muon"], "another optimizer"), (["init_from=folder"], "its config.json"),
    (["dataset=othertokenizer", "resume=true", "run=r"], "was trained with tokenizer byte"),
    (["resume=true", "run=badstate"], "the checkpoint does not fit"),
    (["init_from=out/gtp_tiny"], "neither a folder nor a hub name"),
    (["init_from=./nowhere"], "init_from=./nowhere: ./nowhere is neither a folder nor a hub name"),
    (["resume=true", "run=pipe"], "pipe/ckpt.pt: it is not a regular file"),
    (["model=rat", "init_from=out/r"], "model=rat does not fit the checkpoint, which holds model=gpt"),
    (["teacher=out/r", "block_size=32"], "teacher=out/r has vocab_size=257 and takes 16 tokens"),
    (["run=r", "overwrite=true", "init_from=out/r/best.pt"], "is in the folder of the run itself, which overwrite=true empties"),
    *((["run=r", "overwrite=true", f"teacher={path}"], "is in the folder of the run itself") for path in (
        "out/r", "out/r/ckpt.pt")),
    # data sets and tasks
    (["dataset=shakespeare"], "python prepare.py dataset=shakespeare tokenizer=byte"),
    (["dataset=file:empty.txt"], "is empty"), (["dataset=file:{w}/ö.txt"], "was made with dataset=file:"),
    (["tokenizer=char"], "is not the one of dataset=words"),
    (["dataset="], "does not exist: make it with python prepare.py dataset= "),
    (["dataset=file:pipe"], "neither a file nor a folder"), (["dataset=task:nothing"], "the tasks are task:recall, "),
    (["dataset=task:recall", "block_size=7"], "block_size=7 is impossible for dataset=task:recall"),
    (["dataset=task:recall", "task_examples=1_000_000_000"], "too many to hold in memory"),
    (["dataset=task:s3", "batch_size=1_000_000_000_000"], "batch_size=1000000000000 examples of block_size=16 are too many"),
    (["dataset=task:s3", "block_size=200_000"], "for the 1280 examples of an evaluation: it must be at most 104857"),
    # config files
    (["config=pipe"], "pipe cannot be read"),
    (["config=number.yaml"], "model must be text without a zero byte (in YAML: in quotes)"),
    (["config=sixty.yaml"], "keep_interval must be an int (less than 2^63), and not '1:30'"),
    (["config=twice.yaml"], "'seed' stands there twice"), (["config=home.yaml"], "there is no such user"),
    (["config=true.yaml"], "seed must be an int"), (["config=broken.yaml"], "broken.yaml is not valid YAML"),
    (["config=large.yaml"], "grad_clip"), (["config=resume.yaml", "overwrite=true", "run=r"], "exclude each other"),
    # models
    (["model=mor", "n_layer=9"], "n_layer=9 does not fit share=middle_cycle with n_loop=3: 8 or 11 would"),
    (["model=mor", "router=token", "loop_warmup=0.5"], "must be from 0 to 1, and 0 with router=token"),
    *(([f"model={name}", "loop_warmup=1.5"], "loop_warmup=1.5 must be from 0 to 1") for name in ("mor", "relaxed")),
    (["model=rat", "n_embd=15", "n_head=3"], "head_dim=5 must be even"),
    (["model=relaxed", "n_layer=9"], "n_loop=2 must divide"),
    # more than any machine can address
    *(([f"{size}=1000000000000000"], "not enough memory: ") for size in (
        "n_embd", "batch_size", "gradient_accumulation_steps")), (["n_embd=4611686018427387904"], "not enough memory: "),
]
SAMPLE = [
    ([], "the command needs a run folder or checkpoint"), (["x" * 300], "File name too long"),
    (["out/r", "prompt="], "the prompt is empty"), (["out/r", "prompt=FILE:latin.txt"], "latin.txt is not UTF-8"),
    (["out/r", "prompt=FILE:missing.txt"], "missing.txt cannot be read"),
    (["out/r", "prefill=exact"], "unknown option 'prefill' of model=gpt"),
    (["out/r", "dtype=float16"], "dtype=float16 must be one of: auto, float32, bfloat16"),
]
BENCH = [
    (["nothing"], "needs a NAME, which is one of"), (["rt", "model=gpt"], "model=gpt is not measured by lab.bench rt"),
    (["rt", "block_size=1"], "block_size=1 is too short"),
    (["gpt", "skip=fast,naive"], "skip=fast,naive must be parts of some names"),
    (["rt", "skip=naiv,slow"], "the names are plain Transformer | without recurrence | wavefront | tiled | naive"),
    (["rat", "longest=-1"], "longest=-1 must be at least 0"),
    (["relaxed", "init_from=out/r", "n_loop=1"], "requests of 112 tokens need block_size=112 or more"),
]
EVAL = [
    (["out/r", "tasks=piqa", "prefill=exact"], "unknown option 'prefill' of model=gpt"),
    (["out/r", "exit_loop=2"], "exit_loop"), (["out/relaxed", "exit_loop=9"], "exit_loop=9 must"),
    (["out/r", "lengths=2,3"], "lengths=2,3: each must divide"), (["out/r", "lengths=half"], "must be whole numbers, as 1,2,4"),
    (["out/r", "dataset=task:s3"], "not the one of the data set (task, 6"),
    (["out/r", "batch_size=0"], "batch_size=0 must be at least 1"),
]
SERVE = [
    (["requests="], "give requests=FILE"), (["requests=no.jsonl"], "no.jsonl cannot be read: No such"),
    (["prompt=a", "exit=never"], "exit=never: static:1 to static:2, confidence:P"),
    (["requests=empty.txt"], "empty.txt is empty"), (["prompt=LINES:empty.txt"], "empty.txt is empty"),
    (["prompt=a", "slots=0"], "slots=0 must be at least 1"),
]
PREPARE = [
    (["dataset=file:latin.txt"], "0 documents of UTF-8 text, 1 others"),
    (["dataset=file:nothing*.txt"], "and none match it"), (["dataset=pyton"], "the data sets are python, "),
    (["tokenizer=bpe:257"], "the size must be 258 to"), (["tokenizer=morse"], "the tokenizers are byte, "),
    (["name=packages"], "name=packages is the name of a data set itself"),
    (["tokenizer=hf:folder"], "folder/tokenizer.json cannot be read"), (["val_fraction=0"], "val_fraction must"),
    (["max_tokens=1e3"], "max_tokens must be an int"), (["max_tokens=" + "9" * 5000], "max_tokens must be an int"),
    (["max_tokens=" + "9" * 19], "less than 2^63"), (["val_fraction=nan"], "must be a finite float"),
    (["overwrite=1"], "overwrite must be true or false"), (["dataset=a\0b"], "without a zero byte"),
    (["name"], "not of the form option=value"),
    (["data_dir=afile"], "cannot make afile/python-byte: [Errno 20] Not a directory"),
]
PROGRAMS = {"train": (train.main, T, TRAIN), "sample": (sample.main, [], SAMPLE), "bench": (bench.main, [], BENCH),
            "eval": (evaluation.main, [], EVAL), "prepare": (prepare.main, [], PREPARE),
            "serve": (serve.main, ["out/relaxed"], SERVE)}
CASES = [(program, first + args, message) for program, (_, first, cases) in PROGRAMS.items() for args, message in cases]


def refusal(main, argv, monkeypatch, capfd):
    """Return the one line of an error that ends a program with status 2."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, argv)])
    with pytest.raises(SystemExit) as stop:
        options.run_cli(main)
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("error: ") and len(err) < 1500, err
    return err


@pytest.mark.parametrize("program, args, message", CASES,
                         ids=lambda x: ",".join(x[-2:]) if isinstance(x, list) else None)
def test_one_line_and_exit_2(program, args, message, world, capfd, monkeypatch):
    argv = [a.format(w=world) for a in args]
    if program == "train" and not any(a.startswith("run=") for a in argv):
        argv.append("run=fresh")
    monkeypatch.chdir(world)
    before = snapshot(world)
    assert message in refusal(PROGRAMS[program][0], argv, monkeypatch, capfd)
    assert snapshot(world) == before


def test_values_of_a_config_file_are_those_of_the_command_line(tmp_path, monkeypatch):
    """YAML 1.1 would read some of these numbers in another way. ~ is the home folder in paths."""
    lines = {"max_steps": "0100", "learning_rate": "1e-3", "seed": "1_000", "run": "'7'", "compile": "true",
             "grad_clip": ".5", "out_dir": "~/out", "init_from": "~/x", "max_flops": "1e15"}
    (tmp_path / "x.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    cfg = options.typed_config(TrainConfig, options.load_yaml(tmp_path / "x.yaml"))
    assert cfg == options.typed_config(TrainConfig, {**lines, "run": "7"})
    assert (cfg.max_steps, cfg.learning_rate, cfg.grad_clip, cfg.seed, cfg.compile) == (100, 1e-3, 0.5, 1000, "true")
    assert cfg.out_dir == os.path.expanduser("~/out") and cfg.init_from == os.path.expanduser("~/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert merge({"config": "~/x.yaml", "init_from": ""}, checkpoint.load_start)[0].folder == tmp_path / "out" / "7"


@pytest.mark.parametrize("program, key", [("train", "init_from=owner/name"), ("prepare", "n=3"), ("serve", "n=3")])
def test_from_the_shell(program, key, tmp_path):
    """A program is started from any folder, and no library was loaded before. (serve.py imports sample.py.)"""
    p = subprocess.run([sys.executable, ROOT / f"{program}.py", key], cwd=tmp_path, capture_output=True, text=True,
                       env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert (p.returncode, p.stdout, p.stderr.count("\n")) == (2, "", 1) and p.stderr.startswith("error: "), p.stderr
    assert list(tmp_path.iterdir()) == []


def of_library(module, kind, text):
    """Return an error whose class has the module of a library, which is not imported here."""
    return type("Failure", (kind,), {"__module__": module})(text)


@pytest.mark.parametrize("error, told", [
    (MemoryError(), "not enough memory: "),
    (PermissionError(13, "Permission denied", "locked/run"), "locked/run: Permission denied"),
    (RuntimeError("CUDA out of memory. Tried to allocate 5 GiB"), "not enough memory: CUDA out of"),
    (of_library("pyo3_runtime", BaseException, "range end index 2\nmore"),
     "a library broke off, perhaps because a file is damaged: range end"),
    (of_library("torch._inductor.exc", RuntimeError, "No working C++ compiler\nmore"), "the compiler failed (compile=false trains"),
    (RuntimeError("Failed to find C compiler. Please specify via CC"), "a compiler is missing or failed: Failed to find"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "the device failed: CUDA error: CUBLAS"),
    (torch.distributed.DistNetworkError("no route\nmore"), "the processes cannot reach each other: no route")])
def test_what_the_machine_refuses_is_one_line(error, told, capfd, monkeypatch):
    def main(argv):
        raise error
    assert refusal(main, [], monkeypatch, capfd).startswith(f"error: {told}")


def test_another_process_has_ended(capfd, monkeypatch):
    """A process of torchrun that loses its connection to a process that was killed has one line. A bug has its
    traceback."""
    def main(argv):
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:43745. GLHF!")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        options.run_cli(main)
    assert stop.value.code == 2 and capfd.readouterr().err.startswith("error: another process has ended")
    for error in RuntimeError("mat1 and mat2 cannot be multiplied"), ZeroDivisionError(), KeyError("x"):
        with pytest.raises(type(error)):
            options.run_cli(lambda argv, error=error: (_ for _ in ()).throw(error))


def one_of_several():
    """Run a call that has bad input, in a process that has met others. A shutdown would call the finalizer."""
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    multiprocessing.util.Finalize(None, os._exit, [86], exitpriority=1)
    options.run_cli(lambda argv: (_ for _ in ()).throw(UserError("no data")))


def test_one_of_several_processes_ends_without_a_shutdown():
    child = runs.fork(one_of_several)
    child.join(60)
    assert child.exitcode == 2


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["0 1", "1"])
def test_torchrun_tells_an_error_once(ranks, tmp_path):
    """Of all processes or of one, whichever has it; they have not met yet."""
    (tmp_path / "program.py").write_text(f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
from {options.__name__} import UserError, run_cli
def main(argv):
    if os.environ["RANK"] in argv:
        raise UserError("unknown option")
run_cli(main)
""")
    p = python(*TORCHRUN, tmp_path / "program.py", *ranks.split())
    assert p.returncode and p.stderr.count("error: unknown option") == 1, p.stderr


def test_streams_that_nobody_reads(world, tmp_path):
    """A daemon closes stdin, stdout and stderr, or head ends. The program goes on to its end."""
    command = [sys.executable, ROOT / "prepare.py", f"dataset=file:{world / 'ö.txt'}", f"data_dir={tmp_path}"]
    done = subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command])
    assert done.returncode == 0 and len(list(tmp_path.glob("*/meta.json"))) == 1
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        options.say("a line", pipe)

