"""
All command lines of this project read options and report errors in the same way. This file also
has the options of training.

Arguments have the form option=value. They are checked against a dataclass whose fields are the
options, and the comment beside a field is its help text. Bad input raises a UserError. It is
printed as one line, and the exit status is 2. Errors of the machine and of libraries are printed in
the same way (in_one_line). Any other error is a bug, and its traceback is shown.

The parts of this file are errors, options, files and names, the options of training, and `merge`,
which merges defaults, a config file, a checkpoint and the command line.
"""
import contextlib
import difflib
import errno
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
import shutil
import sys
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path

import yaml

try:
    import fcntl
except ImportError:     # Windows has none, so that nothing keeps two processes out of one folder
    fcntl = None

HERE = Path(__file__).resolve().parent.parent      # the project's root
EXPERIMENTS = str(HERE / "lab" / "experiments")    # controls of RESULTS.md are model files there
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class UserError(Exception):
    """A UserError stands for bad input. Its message is one line that names the thing and says what
    is allowed."""


def choice(*allowed):
    """Return a dataclass field whose value is one of `allowed`. The first is the default."""
    return field(default=allowed[0], metadata={"allowed": allowed})


def run_cli(main, schema=None):
    """Call main(sys.argv[1:]), or print the help about the options of `schema` if that is asked
    for. Bad input is one line on stderr and exit status 2."""
    open_streams()
    if hasattr(sys.stdout, "reconfigure"):      # a terminal shows ? for what it cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        if schema and asks_help(sys.argv):
            print(help_text(schema))
        else:
            main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader (head) has gone: nothing can be printed, nor at exit
        silence(sys.stdout)
        sys.exit(141)
    except BaseException as e:  # a panic of a library in Rust is no Exception
        line = in_one_line(e)
        if line is None:
            raise
        if not told_by_another():
            say(f"error: {line}", sys.stderr)
        end_process(2)


def end_process(status):
    """End this process. If it is one of several that have met, it ends without Python's shutdown.
    The shutdown sometimes aborts on gloo's threads (exit status -6), which DDP and DTensor's caches
    keep alive."""
    dist = sys.modules.get("torch.distributed")     # None where torch was not loaded
    if dist and dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def told_by_another():
    """Return whether another process of torchrun has come here before. All processes meet an error
    in the options, but only the first one prints it. torchrun has a store, in which they count
    themselves."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    from torch.distributed import TCPStore
    with contextlib.suppress(RuntimeError):     # no connection
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                         timeout=timedelta(seconds=5))
        return store.add(f"told/{os.environ['TORCHELASTIC_RESTART_COUNT']}", 1) > 1
    return False


def open_streams():
    """Open /dev/null in the place of a closed stdin, stdout or stderr, because a daemon may start a
    program so. Otherwise the next file that is opened would take the place, and would receive what
    libraries print."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def silence(stream):
    """Let /dev/null receive what is written to a stream from now on, also at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# The classes of a compiler's errors, and of those of a library in Rust, stand in these modules.
COMPILERS = "torch._dynamo", "torch._inductor", "torch._functorch", "triton"
RUST = "pyo3_runtime"
# These errors have no class of their own and are known by their messages.
TOO_LARGE = ("allocate memory|out of memory|size calculation overflowed|array is too big|"
             "allowed dimension|Overflow when unpacking")
NO_COMPILER = r"find C compiler|'[^']*(gcc|g\+\+|clang|nvcc|cl\.exe)'.* returned non-zero"
DEVICE = "(CUDA|HIP|MPS) error|(CUBLAS|CUDNN|CUSOLVER)_STATUS"
# Another process of torchrun has ended (these words are searched only under torchrun).
# told_by_another knows whether it has told why.
LOST = r"[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe|remote process exited|ncclRemoteError"


def lacks_memory(e):
    """Return whether an error says that memory is too small. torch has a RuntimeError for this."""
    return isinstance(e, MemoryError) or re.search(TOO_LARGE, str(e)) is not None


def in_one_line(e):
    """Return what to tell about an error of the input, the machine or a library. Return None for
    another error, which is a bug, so that its traceback is shown."""
    modules = [kind.__module__ for kind in type(e).__mro__]
    # torch.compile begins with "backend='inductor' raised:", and the error is in the next line.
    lines = [line for line in map(str.strip, str(e).splitlines()) if line[-7:] != "raised:"]
    first = (lines or [type(e).__name__])[0][:300]
    if isinstance(e, UserError):
        return " ".join(str(e).split())
    if lacks_memory(e):
        return f"not enough memory: {first}"
    if isinstance(e, OSError):                  # a path is wrong, or a disk is full
        reason = e.strerror or first
        return f"{str(e.filename):.100}: {reason}" if e.filename else reason
    if "WORLD_SIZE" in os.environ and isinstance(e, RuntimeError) and re.search(LOST, str(e)):
        return f"another process has ended, perhaps killed: {first}"
    causes = {"the compiler failed (compile=false trains without torch.compile, and fast=false "
              "without our kernels)": any(module.startswith(COMPILERS) for module in modules),
              "a compiler is missing or failed": re.search(NO_COMPILER, str(e)),
              "a library broke off, perhaps because a file is damaged": RUST in modules,
              "the processes cannot reach each other": "torch.distributed" in modules,
              "the device failed": re.search(DEVICE, str(e))}
    for words, fits in causes.items():
        if fits:
            return f"{words}: {first}"
    return None


# ---- options ----

def is_option(arg) -> bool:
    """Return whether an argument has a = and the text before the first = is a name, not a path."""
    return "=" in arg and arg.partition("=")[0].isidentifier()


def split_args(argv, least=0, most=0):
    """Return the paths among the arguments and the options, as in ["out/a=1/r", "n=3"] ->
    (["out/a=1/r"], {"n": "3"}). If an option is given twice, the last one holds. Raise UserError
    if there are fewer than `least` paths or more than `most`. None as `most` allows any number."""
    for arg in argv:
        if arg.startswith("-"):
            raise UserError(f"options have no dashes here: {arg.lstrip('-')}")
    given = dict(arg.split("=", 1) for arg in argv if is_option(arg))
    paths = [home(arg) for arg in argv if not is_option(arg)]
    if most is not None and len(paths) > most:
        raise UserError(f"argument {paths[most]!r} is not of the form option=value"
                        + ", such as config=FILE.yaml" * paths[most].endswith((".yaml", ".py"))
                        + f", and the run is already {paths[0]!r}" * bool(most))
    if len(paths) < least:
        raise UserError("the command needs a run folder or checkpoint: out/NAME [option=value ...]")
    return paths, given


def as_command(program, *options, path=None):
    """Return a command line to copy from the screen. A path that reads like an option is made to
    begin with ./ there."""
    paths = [f"./{path}" if is_option(str(path)) else str(path)] if path else []
    return f"python {program} {shlex.join([*paths, *options])}"


def note(text, file=None):
    """Print a note. Among torchrun's processes, only the first one does."""
    if os.environ.get("RANK", "0") == "0":
        say(f"note: {text}", file)


def say(text, file=None):
    """Print a line at once, and in one piece, because other processes may write too. If nobody can
    read it any more (head has ended, or the disk is full), the program goes on, because a run has
    its log and its checkpoints."""
    stream = file or sys.stdout
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError:
        silence(stream)


def asks_help(argv) -> bool:
    return bool({"-h", "--help", "help"} & set(argv))


def help_text(schema, usage=None) -> str:
    """Return the usage and the options. The usage is by default the docstring of the schema's
    module. The options stand there as in the source, with type, default and comment."""
    usage = usage or inspect.getdoc(sys.modules[schema.__module__]) or ""   # python -OO has none
    source = "\n".join(map(inspect.getsource, reversed(schema.__mro__[:-1])))
    options = dict(re.findall(r"^    (\w+)(: \w+ = .*)$", source, re.MULTILINE))
    return "\n".join([usage.strip(), "", *(f"    {name}{rest}" for name, rest in options.items())])


class Options:
    """Dataclasses of options inherit a check from this class."""

    def between(self, **bounds):
        """Check bounds, given as name=(low, high). Both bounds are allowed values, and None as high
        is no bound. Raise ValueError for a value outside."""
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            most = f" and at most {high}" if high is not None else ""
            if not low <= value <= (math.inf if high is None else high):
                raise ValueError(f"{name}={value} must be at least {low}{most}")


def typed_config(schema, values):
    """Return an instance of the dataclass `schema` with `values`, which may be text of the command
    line or plain values of a YAML file. Raise UserError if an option is unknown, or if a value has
    the wrong type or is not one of those that choice() allows."""
    kinds, typed = typing.get_type_hints(schema), {}
    allowed = {f.name: f.metadata["allowed"] for f in fields(schema) if "allowed" in f.metadata}
    check_known(values, kinds)
    for name, value in values.items():
        if name in allowed and str(value).lower() in ("true", "false"):  # a bool of YAML, or True
            value = str(value).lower()
        typed[name] = typed_value(name, value, kinds[name])
        if typed[name] not in allowed.get(name, [typed[name]]):
            words = ", ".join(filter(None, allowed[name]))
            raise UserError(f"{name}={value} must be one of: {words}")
    try:
        return schema(**typed)
    except ValueError as e:     # the schema has checks of its own
        raise UserError(first_line(e)) from None


def names(*schemas) -> list:
    """Return the names of the fields of dataclasses."""
    return [f.name for schema in schemas for f in fields(schema)]


def known(values, options, what) -> dict:
    """Return the values of those options that exist. A note names each value that is dropped."""
    for name in sorted(values.keys() - set(options), key=str):
        note(f"{what}: {name}={values[name]!r} is dropped: there is no such option", sys.stderr)
    return {name: value for name, value in values.items() if name in options}


def check_known(values, options, where="", what="option"):
    """Raise UserError for the first name in `values` that is not in `options`. The message calls
    such a name a `what`, and puts `where` behind it."""
    for name in map(str, values):
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the {what}s are " + ", ".join(options)
            raise UserError(f"unknown {what} {name!r:.60}{where}: {hint}")


# In the values of these options, ~ is the home folder.
PATHS = ("out_dir", "data_dir", "init_from", "teacher", "config", "export", "requests",
         "include_path")


def home(path) -> str:
    """Return a path with the home folder in place of ~, as a shell writes it. Raise UserError if
    there is no such user, so that no folder is named ~."""
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise UserError(f"{path}: there is no such user; a file of this name is ./{path}")
    return full


KINDS = {int: "an int (less than 2^63)", float: "a finite float", bool: "true or false",
         str: "text without a zero byte (in YAML: in quotes)"}


def typed_value(name, value, kind):
    """Return a value, which is text or comes from a YAML file, as int, float, bool or str. An int
    is written as an int (1000 or 1_000, and not 2.5, 1e3 or true), and a float is finite."""
    text = isinstance(value, str)
    with contextlib.suppress(ValueError, OverflowError):
        digits = text and re.fullmatch("[+-]?[0-9]+(_[0-9]+)*", value)
        if kind is int and (type(value) is int or digits) and abs(int(value)) < 2**63:
            return int(value)
        if kind is float and type(value) in (int, float, str) and math.isfinite(float(value)):
            return float(value)
        if kind is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind is str and text and "\0" not in value:      # no file name holds a zero byte
            return home(value) if name in PATHS else value
    shown = type(value).__name__ if isinstance(value, (list, dict)) else f"{value!r:.60}"
    raise UserError(f"{name} must be {KINDS[kind]}, and not {shown}")


class Loader(yaml.SafeLoader):
    """A reader of YAML in which numbers are written as on the command line. (In YAML 1.1, 0100 is
    64, 1:30 is 90, 1e-3 is text and yes is true. Here they are 100, text, 0.001 and text.) A name
    that stands twice in a file is refused."""
    yaml_implicit_resolvers = {}

    def construct_mapping(self, node, deep=False):
        found = [name.value for name, _ in node.value]
        for name in found:
            if found.count(name) > 1:
                raise ValueError(f"{name!r} stands there twice")
        return super().construct_mapping(node, deep)


for name, pattern, construct in (       # the first pattern that matches a plain scalar decides
        ("null", "~|null|", lambda text: None), ("bool", "true|false", lambda text: text == "true"),
        ("int", "[+-]?[0-9]+(_[0-9]+)*", int),
        ("float", r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", float)):
    tag = f"tag:yaml.org,2002:{name}"
    Loader.add_implicit_resolver(tag, re.compile(f"(?:{pattern})$"), None)
    Loader.add_constructor(tag, lambda loader, node, construct=construct: construct(node.value))


def load_yaml(file):
    """Return the options of a config file. Raise UserError if it is missing, or has other lines
    than `option: value`."""
    text = read_text(file, f"config={file}")
    try:
        values = Loader(text).get_single_data()
        if not isinstance(values, dict):
            raise ValueError("no lines of options")
        return values
    except Exception as e:      # the YAML parser has many kinds of errors, all about this file
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"config={file} is not valid YAML of `option: value` lines: "
                        f"{reason}") from e


def model_module(name):
    """Return the module model_<name>.py, which stands in the project's root, in lab/experiments or
    on PYTHONPATH. A UserError names the models that there are, or what a model file needs."""
    name = typed_value("model", name, str)
    if EXPERIMENTS not in sys.path:
        sys.path.append(EXPERIMENTS)
    if not name.isidentifier() or importlib.util.find_spec(f"model_{name}") is None:
        found = sorted(p.stem.removeprefix("model_") for p in HERE.glob("model_*.py"))
        raise UserError(f"model={name} is unknown: the models are {', '.join(found)}")
    module = importlib.import_module(f"model_{name}")
    config, needs = getattr(module, "Config", None), {"block_size", "vocab_size", "fast"}
    if not (isinstance(config, type) and is_dataclass(config) and needs <= {*names(config)}
            and all(f.default is not MISSING for f in fields(config))
            # A subclass with new fields that lacks @dataclass would lose them.
            and (not inspect.get_annotations(config) or "__dataclass_fields__" in vars(config))
            and {"state_dict", "flops_per_token"} <= {*dir(getattr(module, "Model", None))}):
        raise UserError(f"{module.__file__} is not a model file: it needs a dataclass Config with "
                        f"block_size, vocab_size, fast and a default for each field, and a torch "
                        f"module Model with flops_per_token")
    if taken := {*names(TrainConfig)} & {*names(config)}:
        raise UserError(f"{module.__file__}: {min(taken)} is an option of train.py, so that "
                        f"the field needs another name")
    for f in fields(config):
        if getattr(config, f.name) != f.default:    # an assignment without a type makes no field
            raise UserError(f"{module.__file__}: {f.name} of Config has no type, so that its value "
                            f"would have no effect: write {f.name}: TYPE = VALUE")
    for option, kind in typing.get_type_hints(config).items():
        if option in names(config) and kind not in (int, float, bool, str):
            raise UserError(f"{module.__file__}: the type of {option} must be int, float, bool or "
                            f"str, because it is an option")
    return module


# ---- files and names ----

def check_name(name, what="name") -> str:
    """Return the name of a data set or run. Raise UserError if it has a separator or a leading
    dot, so that it cannot leave its folder."""
    if not NAME.fullmatch(name) or len(name) > 200:
        raise UserError(f"{what} {name!r:.60} is not allowed: it may have up to 200 letters, "
                        "digits and . _ + -, and must begin with a letter or digit")
    return name


def plain_name(text) -> str:
    """Return a folder's name for any text, such as file-a-b.txt for file:a/b.txt. A long one ends
    in a hash."""
    name = re.sub(r"[^A-Za-z0-9._+-]", "-", text).lstrip("._+-") or "x"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return name if len(name) <= 100 else f"{name[:80]}-{digest[:16]}"


LOCKS = {}      # {folder: its open descriptor}, for the folders that this process has locked


def lock(folder, what="run of this name"):
    """Keep a folder for this process. The kernel releases the lock when the process ends, however
    it ends. Return whether this process has a lock now, because some systems have none. Raise
    UserError if another process has the folder. The message calls that process `what`."""
    folder = folder.absolute()
    if folder in LOCKS or fcntl is None:
        return folder in LOCKS
    LOCKS[folder] = fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        unlock(folder)
        raise UserError(f"{folder} is in use: another {what} goes on") from None
    except OSError:                             # some network file systems have no locks
        unlock(folder)
    return folder in LOCKS


def unlock(folder):
    if folder.absolute() in LOCKS:
        os.close(LOCKS.pop(folder.absolute()))


def is_inside(path, folder) -> bool:
    """Return whether a path is the folder itself or lies in it."""
    path, folder = Path(path).resolve(), Path(folder).resolve()
    return folder in (path, *path.parents)


def sha256_of(path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_file(path):
    """Return a file that is open to read its bytes. Raise OSError for a pipe too, because reading
    it may never end."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(path, "rb")


@contextlib.contextmanager
def naming(path):
    """Inside, an OSError gets the file's name, because the error of a full disk has none."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror or first_line(e), e.filename or str(path)) from e


def replace_file(path, content):
    """Write bytes as a file in one move, so that the older file stays if the disk is full."""
    temporary = Path(f"{path}.tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())     # else a power cut may leave an empty file
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def put_back(temporary, place):
    """Remove a temporary folder, and its lock if it has one. What stood in a place before, and
    stands in the folder as "old", goes back there if the place is still empty."""
    if (temporary / "old").exists() and not place.exists():
        os.rename(temporary / "old", place)
    shutil.rmtree(temporary, ignore_errors=True)
    unlock(temporary)


def read_text(path, name) -> str:
    """Return the text of a file. Raise UserError, which calls the file `name`, if it is not there
    or is not UTF-8."""
    try:
        with open_file(path) as f:
            return f.read().decode("utf-8-sig")  # without a byte order mark
    except OSError as e:
        raise UserError(f"{name} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{name} is not UTF-8 text") from e


def read_json(file) -> dict:
    """Return the object in a JSON file. Raise UserError if the file is not there or holds no
    object."""
    try:
        return {**json.loads(read_text(file, file))}
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{file} is not a JSON object: {first_line(e)}") from None


def first_line(e) -> str:
    """Return the message of an exception in one line."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300]


def need(module):
    """Return a module. Raise UserError if its package cannot be imported."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as e:
        if importlib.util.find_spec(package):
            raise UserError(f"the package {package} cannot be imported: {first_line(e)}") from None
        raise UserError(f"the package {package} is missing: pip install {package}") from None


# ---- the options of training ----

@dataclass
class TrainConfig(Options):
    """The options of train.py. A model's own options stand in its file, in its Config."""
    run: str = ""  # name of the folder of results in out_dir (default: the config file's name)
    out_dir: str = "out"  # where run folders are
    init_from: str = ""  # start from the weights of a run or of a Hugging Face model
    resume: str = choice("false", "true", "auto")  # go on from ckpt.pt; auto: if there is one
    overwrite: bool = False  # remove the run that is in the folder, and begin anew
    eval_only: bool = False  # only evaluate ckpt.pt, or init_from
    model: str = "gpt"  # which model_<name>.py: here, in lab/experiments or on PYTHONPATH
    config: str = ""  # YAML file of options (default: configs/<model>_tiny.yaml)
    # data
    dataset: str = "python"  # as for prepare.py, or the name of its folder, or task:NAME
    tokenizer: str = "byte"  # byte | char | bpe:SIZE | gpt2 | hf:PATH_OR_NAME
    data_dir: str = "data"  # where prepared data sets are
    task_examples: int = 0  # number of a task's training examples (0: the task's own)
    batch_size: int = 12  # sequences in one forward pass (a micro-batch)
    gradient_accumulation_steps: int = 1  # micro-batches of a step, of all processes together
    # optimization
    max_steps: int = 2000  # optimizer steps
    max_flops: float = 0.0  # FLOPs of training, without a teacher's; sets max_steps (0: no limit)
    optimizer: str = choice("adamw", "muon")  # muon: for the blocks' matrices only
    learning_rate: float = 1e-3  # AdamW's peak (lrt with muon: see common/optim.py)
    muon_learning_rate: float = 0.02  # Muon's peak
    muon_momentum_steps: int = 0  # steps of Muon's momentum from 0.85 to 0.95 (0: always 0.95)
    weight_decay: float = 0.1  # not on vectors (lrt with muon: see common/optim.py)
    decay_schedule: str = choice("constant", "linear")  # of weight_decay; linear: falls to 0
    beta1: float = 0.9  # AdamW (lrt with muon: its own)
    beta2: float = 0.99  # AdamW (lrt with muon: its own)
    grad_clip: float = 1.0  # largest gradient norm (0: no clipping)
    lr_schedule: str = choice("cosine", "linear", "trapezoid")  # linear: constant, then falls
    warmup_steps: int = 100  # linear warm-up of cosine and trapezoid
    cooldown_frac: float = 0.2  # last fraction of the steps, in which linear and trapezoid fall
    min_lr_frac: float = 0.1  # the fraction of the peak that the schedules fall to
    # evaluation and logging
    eval_interval: int = 250  # steps from one evaluation to the next; each begins with a save
    keep_interval: int = 0  # steps between checkpoints step_N.pt that are kept (0: none)
    eval_batches: int = 40  # micro-batches of an evaluation (0: all)
    exact_batches: int = 0  # lrt: batches that the exact, slow chain evaluates, too (0: all)
    log_interval: int = 10  # steps between lines in log.jsonl
    sample_prompt: str = ""  # text that the sample at the end continues (default: val's beginning)
    sample_tokens: int = 256  # length of the sample in tokens (0: no sample)
    # how to run
    seed: int = 1337  # of the weights, the batches and dropout
    device: str = "auto"  # auto | cpu | mps | cuda | cuda:N
    dtype: str = choice("auto", "float32", "bfloat16")  # auto: bfloat16 if a GPU has it
    compile: str = choice("auto", "true", "false", "graph")  # true: torch.compile; auto: on cuda
    fsdp: bool = False  # torchrun: shard weights and optimizer (FSDP2)
    teacher: str = ""  # distil from this model, named as in init_from

    def __post_init__(self):
        numbers = {f.name: (0, None) for f in fields(self) if f.type in (int, float)}
        counts = dict.fromkeys(("batch_size", "gradient_accumulation_steps", "max_steps",
                                "eval_interval", "log_interval"), (1, None))
        self.between(**{**numbers, **counts, "sample_tokens": (0, 2 ** 20),
                        "beta1": (0, 0.99999), "beta2": (0, 0.99999),
                        "cooldown_frac": (0, 1), "min_lr_frac": (0, 1)})
        if self.resume != "false" and self.overwrite:
            raise ValueError(f"resume={self.resume} and overwrite=true exclude each other")

    @property
    def folder(self):
        """Return out_dir/run. run must be a plain name, so that it cannot leave out_dir."""
        return Path(self.out_dir) / check_name(self.run, "run")


# ---- merging: defaults < config file < checkpoint < command line ----

# If a call of train.py starts from a checkpoint, this table lists the sources of each option. The
# last source of a cell that sets the option gives its value. If none sets it, it has its default.
#
#                             resume=true, or eval_only=true  init_from=
#                             without init_from=
#     START                   file, command line              file, command line
#     others of TrainConfig   checkpoint, command line        file, command line
#     fast                    checkpoint, command line        file, command line
#     NOT_IN_WEIGHTS          checkpoint, command line        checkpoint, a file that config=
#                                                             names, command line
#     others of the model     checkpoint                      checkpoint
#
# START says what one call does. NOT_IN_WEIGHTS are fields of a model that its weights do not fix,
# and the NOT_IN_WEIGHTS of its Config are more of them. The command line may repeat the other
# fields of the model, but not change them.
START = {"run", "out_dir", "init_from", "resume", "overwrite", "eval_only"}
NOT_IN_WEIGHTS = {"fast", "dropout", "block_size"}


def merge(given, load):
    """Return the TrainConfig, the fields of the model's Config, and the checkpoint or None.

    `given` are the options of the command line, as text. `load` is load_start of
    common/checkpoint.py, which imports this file. The fields have no vocab_size where nothing sets
    it, because it is the data's then. On resume, notes name the values of a config file that the
    run does not take."""
    file, saved, left = config_file(given), {}, set()
    # `saved` are the checkpoint's values, and `left` the names that it does not decide.
    named = file if "config" in given else {}   # such a file may change fields with init_from=
    start = typed_config(TrainConfig, chosen({**file, **given}, START))
    if start.eval_only and "init_from" not in given:
        start.init_from = ""        # the run is evaluated, and not the weights that it began with
    if (start.init_from and start.resume != "false" and not start.eval_only
            and not {"run", "model", "config"} & given.keys()):
        raise UserError("resume= with init_from= needs run=NAME (or model=, config=), because the "
                        "run's name depends on the checkpoint")
    ckpt = load(start)      # This sets start.resume (auto: true or false) and start.init_from, too.
    if ckpt is not None and start.init_from:
        ckpt = as_weights_of({**named, **given}.get("model", ckpt["model"]), ckpt)
        file = config_file({"model": ckpt["model"], **given})
        saved = {"model": ckpt["model"], **ckpt["model_config"]}
        if "converts" not in ckpt:      # A field that is newer than the checkpoint has its default.
            config = model_module(ckpt["model"]).Config
            saved |= asdict(typed_config(config, ckpt["model_config"]))
        left = {"fast"} | not_in_weights(ckpt) & named.keys()
        tell_ignored(chosen(named, saved.keys() - left - given.keys()), saved)
    elif ckpt is not None:
        check_same_model(given.get("model", ckpt["model"]), ckpt)
        options = names(TrainConfig, model_module(ckpt["model"]).Config)
        saved = known({**ckpt["config"], **ckpt["model_config"]}, options, start.folder)
        tell_ignored(chosen(named, saved.keys() - START - given.keys()), saved)
        file, left = chosen(file, START), START
    saved = chosen(saved, saved.keys() - left)
    values = {**file, **saved, **given, "resume": start.resume, "init_from": start.init_from}
    dataset = {**file, **saved}.get("dataset", TrainConfig.dataset)
    if values.get("dataset", dataset) != dataset:
        values["sample_prompt"] = given.get("sample_prompt", "")    # a prompt is for its data set
    if "max_steps" in given:
        values["max_flops"] = given.get("max_flops", "0")   # max_steps replaces a saved budget
    return *checked(values, given, ckpt), ckpt


def checked(values, given, ckpt):
    """Return the TrainConfig and the fields of the model's Config, with these values and defaults.
    Raise UserError if two values exclude each other, or if one does not fit the weights."""
    name = values.get("model", TrainConfig.model)
    schemas = TrainConfig, model_module(name).Config
    options, of_file = names(*schemas), values.keys() - given.keys()
    check_known(chosen(values, given), options)
    check_known(chosen(values, of_file), options,
                f" of config={values.get('config')} for model={name}")
    cfg, model = (typed_config(schema, chosen(values, names(schema))) for schema in schemas)
    loaded = typed_config(type(model), asdict(model))       # as from a checkpoint
    for field_name, value in asdict(model).items():
        if getattr(loaded, field_name) != value:
            raise UserError(f"model={name}: __post_init__ of its Config would change "
                            f"{field_name}={value} again when a checkpoint is loaded")
    if cfg.max_flops and {"max_steps", "max_flops"} <= given.keys():
        raise UserError("max_flops sets max_steps: give one of the two")
    for field_name, old in ckpt["model_config"].items() if ckpt else ():
        new = getattr(model, field_name)
        if new != old and field_name not in not_in_weights(ckpt):
            raise UserError(f"{field_name}={new} does not fit the checkpoint, whose model has "
                            f"{field_name}={old} (fast, dropout, block_size and what "
                            f"NOT_IN_WEIGHTS of its Config lists may change)")
    if cfg.resume != "true" and not cfg.eval_only and not Path(cfg.config).exists():
        note(f"there is no {cfg.config}: this is dataset={cfg.dataset} tokenizer={cfg.tokenizer} "
             f"optimizer={cfg.optimizer} max_steps={cfg.max_steps}, and other options that are not "
             f"given have their defaults (train.py help)")
    model_fields = asdict(model)
    if "vocab_size" not in values:
        del model_fields["vocab_size"]
    return cfg, model_fields


def config_file(given):
    """Return the values of the file that config= names, or else of configs/MODEL_tiny.yaml."""
    tiny = HERE / "configs" / f"{given.get('model', TrainConfig.model)}_tiny.yaml"
    file = home(given.get("config", str(tiny)))
    yaml = load_yaml(file) if "config" in given or tiny.exists() else {}
    if "config" in yaml:
        raise UserError(f"{file} has config=, but a config file cannot name another one")
    return {"run": plain_name(Path(file).stem), **yaml, "config": file}


def check_same_model(name, ckpt):
    """Raise UserError if the checkpoint holds another model."""
    if name != ckpt["model"]:
        raise UserError(f"model={name} does not fit the checkpoint, which holds "
                        f"model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """Return a checkpoint as the start of model `name`. The checkpoint holds this model, or a model
    that CONVERTS_FROM of the Config names. From the latter, the fields that both models have are
    kept, and build_model converts the weights. Raise UserError for any other model, or for a
    field that is not its default and that model `name` lacks."""
    config, origin = model_module(name).Config, model_module(ckpt["model"]).Config
    if ckpt["model"] not in getattr(config, "CONVERTS_FROM", ()) or name == ckpt["model"]:
        check_same_model(name, ckpt)
        return ckpt
    old = ckpt["model_config"]
    for f in fields(origin):
        if f.name not in names(config) and old.get(f.name, f.default) != f.default:
            raise UserError(f"the checkpoint's model has {f.name}={old[f.name]}, "
                            f"which model={name} has not")
    return {**ckpt, "model": name, "model_config": chosen(old, names(config)), "converts": True}


def not_in_weights(ckpt):
    """Return the fields of a checkpoint's model that may change."""
    more = getattr(model_module(ckpt["model"]).Config, "NOT_IN_WEIGHTS", ())
    return {*NOT_IN_WEIGHTS, *more, *["n_layer"] * ("converts" in ckpt)}


def tell_ignored(file, saved):
    """Print a note for each option of which a file has another value than the checkpoint. The
    checkpoint's value stays."""
    for name in sorted(file):
        if file[name] != saved[name] and str(file[name]).lower() != saved[name]:    # false, "false"
            note(f"{name}={saved[name]} is the checkpoint's and stays; the file has {file[name]}")


def chosen(values, names):
    return {name: value for name, value in values.items() if name in names}
