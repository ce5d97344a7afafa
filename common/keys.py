"""
Keys and errors: what every command line here has in common.

Arguments are key=value, checked against a dataclass whose fields are the keys; the comment beside
a field is its help text. Bad input raises UserError: one line, exit status 2, never a traceback.
Nothing here knows a model, a data set or torch.
"""
import contextlib
import difflib
import errno
import hashlib
import importlib.util
import inspect
import io
import math
import os
import re
import sys
import typing
from dataclasses import field, fields
from pathlib import Path

from omegaconf import OmegaConf

HERE = Path(__file__).resolve().parent.parent      # the project's root
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class UserError(Exception):
    """Bad input. The message is one line that names the thing and what is allowed."""


def choice(*allowed):
    """A field of a dataclass of keys that is one of `allowed`; the first is the default."""
    return field(default=allowed[0], metadata={"allowed": allowed})


def run_cli(main):
    """main(sys.argv[1:]); bad input is one line on stderr and exit status 2, never a traceback."""
    if hasattr(sys.stdout, "reconfigure"):      # a terminal shows ? for what it cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader (head) has gone: nothing can be printed, nor at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, MemoryError, RuntimeError, OSError) as e:
        message = in_one_line(e)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")      # in one piece: other processes may write too
        sys.exit(2)


def in_one_line(e):
    """What to tell about an error that is not a bug of ours; None for a bug."""
    if isinstance(e, UserError):
        return " ".join(str(e).split())
    if isinstance(e, OSError):                  # of a path that was given
        return f"{str(e.filename):.100}: {e.strerror}" if e.filename else None
    if isinstance(e, MemoryError) or re.search("allocate memory|out of memory", str(e)):
        return f"not enough memory: {first_line(e)}"


# ------------------------------------------------------------------------------------------------
# keys

def split_args(argv) -> dict:
    """["a=1", "b=x=y"] -> {"a": "1", "b": "x=y"}; of a key given twice the last value holds."""
    for arg in argv:
        if arg.find("=") < 1:
            raise UserError(f"argument {arg!r} is not of the form key=value")
    return dict(arg.split("=", 1) for arg in argv)


def asks_help(argv) -> bool:
    return bool({"-h", "--help", "help"} & set(argv))


def help_text(schema, usage=None) -> str:
    """The usage (by default the docstring of the schema's module), then its keys."""
    usage = usage or inspect.getdoc(sys.modules[schema.__module__]) or ""   # python -OO has none
    return "\n".join([usage.strip(), "", "keys, with their defaults:", *key_lines(schema)])


def key_lines(schema) -> list:
    """A line for each key: its default, what it may be, and the comment beside it in the source."""
    comments, lines = field_comments(schema), []
    for f in fields(schema):
        default = str(f.default).lower() if isinstance(f.default, bool) else repr(f.default)
        words = [" | ".join(f.metadata.get("allowed", ())), comments.get(f.name, "")]
        lines.append(f"  {f.name + '=' + default:34} {': '.join(w for w in words if w)}")
    return lines


def field_comments(schema) -> dict:
    """{field: the comment on its line in the source}, also of the base classes."""
    comments = {}
    for cls in reversed(schema.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class without source has no comments
            source = inspect.getsource(cls)
            comments.update(re.findall(r"^    (\w+): .*?\s# (.*)$", source, re.MULTILINE))
    return comments


def typed_config(schema, values, base=None, free_text=()):
    """An instance of the dataclass `schema`: its defaults, then `base` (plain values of a YAML
    file), then `values` (text of the command line). Keys in `free_text` are taken literally.
    UserError for an unknown key or a value of the wrong type."""
    kinds, typed = typing.get_type_hints(schema), {}
    for key, value in {**(base or {}), **values}.items():
        if key not in kinds:
            raise UserError(unknown_key(str(key), kinds))
        literal = key in free_text and isinstance(value, str)
        typed[key] = value if literal else typed_value(key, value, kinds[key])
    try:
        return schema(**typed)
    except ValueError as e:  # of the schema's own checks
        raise UserError(first_line(e)) from None


def unknown_key(key, names) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join(names)
    return f"unknown key {key!r:.60}: {hint}"


KINDS = {int: "int (less than 2^63)", float: "float (finite)", bool: "bool (true or false)",
         str: "str (in YAML: in quotes)"}


def typed_value(key, value, kind):
    """`value` (text, or plain from a YAML file) as `kind`: int, float, bool or str. An int is
    written as one (1000, 1_000; not 2.5, 1e3, true), a float is finite."""
    text = isinstance(value, str)
    if text and "${" in value:
        raise UserError(f"{key}: interpolation is not supported, got {value!r:.60}")
    with contextlib.suppress(ValueError, OverflowError):
        digits = text and re.fullmatch("[+-]?[0-9]+(_[0-9]+)*", value)
        if kind is int and (type(value) is int or digits) and abs(int(value)) < 2**63:
            return int(value)
        if kind is float and type(value) in (int, float, str) and math.isfinite(float(value)):
            return float(value)
        if kind is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind is str and text and "\0" not in value:      # no file name holds a zero byte
            return value
    raise UserError(f"{key}: expected {KINDS[kind]}, got {value!r:.60}")


def load_yaml(file):
    """The flat keys of a config file. UserError where it is missing, or not `key: value` lines."""
    text = io.StringIO(read_text(file, f"config={file}"))
    try:
        values = OmegaConf.to_container(OmegaConf.load(text), resolve=False)
    except Exception as e:  # the YAML parser has many kinds of errors, all about this file
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"config={file} is not valid YAML: {reason}") from e
    if not isinstance(values, dict) or any(isinstance(v, (dict, list)) for v in values.values()):
        raise UserError(f"config={file} must hold flat `key: value` lines")
    return values


def model_module(name):
    """The module model_<name>.py; UserError with the names there are."""
    if not name.isidentifier() or importlib.util.find_spec(f"model_{name}") is None:
        names = sorted(p.stem.removeprefix("model_") for p in HERE.glob("model_*.py"))
        raise UserError(f"model={name} is unknown: {', '.join(names)}")
    return importlib.import_module(f"model_{name}")


# ------------------------------------------------------------------------------------------------
# files and names

def check_name(name, what="name") -> str:
    """The name of a data set or run. It cannot leave its folder: no separator, no leading dot."""
    if not NAME.fullmatch(name) or len(name) > 200:
        raise UserError(f"{what} {name!r:.60} is not allowed: letters, digits and . _ + - "
                        "(200 at most), a letter or digit first")
    return name


def folder_name(dataset, tokenizer) -> str:
    """file:a/b.txt, bpe:512 -> file-a-b.txt-bpe-512; a long one ends with a hash."""
    asked = f"{dataset}-{tokenizer}"
    name = re.sub(r"[^A-Za-z0-9._+-]", "-", asked).lstrip("._+-")
    short = f"{name[:80]}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    return check_name(name if len(name) <= 100 else short)


def read_bytes(path) -> bytes:
    """What a file holds. OSError for a pipe or a device too: reading it may never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def read_text(path, name) -> str:
    """The text of a file. UserError, which calls it `name`, where there is none in UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")  # without a byte order mark
    except OSError as e:
        raise UserError(f"{name} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{name} is not UTF-8 text") from e


def first_line(e) -> str:
    """A foreign exception in one line."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300]


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"the package {module} is missing: pip install {module}") from None


@contextlib.contextmanager
def writing(path):
    """An OSError inside is a UserError that names path: a full disk is told in one line."""
    try:
        yield
    except OSError as e:
        raise UserError(f"could not write {path}: {e.strerror or e}") from e
