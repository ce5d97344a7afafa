"""
Keys and errors: what every command line here has in common.

Arguments are key=value, checked against a dataclass whose fields are the keys; the comment beside a
field is its help text. Bad input raises UserError: one line, exit status 2, never a traceback.
"""
import contextlib
import difflib
import errno
import importlib
import inspect
import io
import math
import os
import re
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

HERE = Path(__file__).resolve().parent
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class UserError(Exception):
    """Bad input. The message is one line that names the thing and what is allowed."""


def run_cli(main):
    """main(sys.argv[1:]); a UserError is one line on stderr and exit status 2, never a traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a character shows a ? instead
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as e:
        sys.stderr.write(f"error: {' '.join(str(e).split())}\n")  # in one piece: other processes may write too
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader (head) has gone: nothing more can be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:
        if not e.filename or e.errno != errno.ENAMETOOLONG:
            raise
        longest = max(Path(e.filename).parts, key=len)  # of a path that was given
        sys.stderr.write(f"error: {longest!r:.60} is too long for the name of a file or folder\n")
        sys.exit(2)


# ---------------------------------------------------------------------------------------------------------
# keys

def split_args(argv) -> dict:
    """["a=1", "b=x=y"] -> {"a": "1", "b": "x=y"}; of a key given twice the last value holds."""
    for arg in argv:
        if arg.find("=") < 1:
            raise UserError(f"argument {arg!r} is not of the form key=value")
    return dict(arg.split("=", 1) for arg in argv)


def asks_help(argv) -> bool:
    return bool({"-h", "--help", "help"} & set(argv))


def parse_args(argv, schema, free_text=()):
    """key=value arguments as an instance of the dataclass `schema`; help prints the keys and exits 0.
    Keys in `free_text` are taken literally."""
    if asks_help(argv):
        print(help_text(schema), flush=True)
        sys.exit(0)
    return typed_config(schema, split_args(argv), free_text=free_text)


def help_text(schema, usage="") -> str:
    """The usage (by default the docstring of the schema's module), then its keys."""
    usage = usage.strip() or inspect.getdoc(sys.modules[schema.__module__]) or ""
    return "\n".join([usage, "", "keys, with their defaults:", *key_lines(schema)])


def key_lines(schema) -> list:
    """A line for each key: its default, what it may be, and the comment beside it in the source."""
    comments, lines = field_comments(schema), []
    for f in fields(schema):
        default = str(f.default).lower() if isinstance(f.default, bool) else repr(f.default)
        words = [" | ".join(f.metadata.get("allowed", ())), comments.get(f.name, "")]
        lines.append(f"  {f.name + '=' + default:34} {': '.join(w for w in words if w)}")
    return lines


def field_comments(schema) -> dict:
    """{field: the comment on its line in the source}, so that the meaning of a key is written once; those of the base
    classes too."""
    comments = {}
    for cls in reversed(schema.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class without source has no comments
            comments.update(re.findall(r"^    (\w+): .*?\s# (.*)$", inspect.getsource(cls), re.MULTILINE))
    return comments


def typed_config(schema, values, base=None, free_text=()):
    """An instance of the dataclass `schema`: its defaults, then `base` (plain values, of a YAML file), then
    `values` (texts, of the command line). UserError names an unknown key or a value of the wrong type."""
    kinds = typing.get_type_hints(schema)
    names = [f.name for f in fields(schema)]
    free, layers = {}, []
    for given in (base or {}), values:
        if not isinstance(given, dict):
            raise UserError(f"a config file holds lines of key: value, got {given!r:.60}")
        for key in given:
            if key not in names:
                raise UserError(unknown_key(str(key), names))
        literal = {k: v for k, v in given.items() if k in free_text and isinstance(v, str)}
        layers.append({k: typed_value(k, v, kinds[k]) for k, v in given.items() if k not in literal})
        free.update(literal)
    try:
        blank = {key: "" for key in free}  # OmegaConf would read ${ and ??? in free text
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *layers, blank))
        return replace(config, **free) if free else config
    except (OmegaConfBaseException, ValueError) as e:  # ValueError: of the schema's own checks
        raise UserError(first_line(e)) from None


def unknown_key(key, names) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join(names)
    return f"unknown key {key!r:.60}: {hint}"


def typed_value(key, value, kind):
    """`value` (text, or plain from a YAML file) as `kind`: int, float, bool, str or Optional of these."""
    if isinstance(value, str) and "${" in value:
        raise UserError(f"{key}: interpolation is not supported, got {value!r:.60}")
    options = typing.get_args(kind) or (kind,)
    if type(None) in options and value in (None, "null", "none", "None"):
        return None
    want = next(t for t in options if t is not type(None))
    try:
        result = convert(value, want)
        if want is not int or abs(result) < 2**63:
            return result
        raise UserError(f"{key}={str(result):.60} must be less than 2^63")
    except (ValueError, OverflowError):
        wanted = {float: "float (finite)", bool: "bool (true or false)", str: "str (in YAML: in quotes)"}
        raise UserError(f"{key}: expected {wanted.get(want, want.__name__)}, got {value!r:.60}") from None


def convert(value, want):
    """Strict: an int is written as one (1000, 1_000; not 2.5, 1e3, true), a float is finite. ValueError."""
    text = type(value) is str
    if want is int and (type(value) is int or text and re.fullmatch("[+-]?[0-9]+(_[0-9]+)*", value)):
        return int(value)
    if want is float and type(value) in (int, float, str) and math.isfinite(float(value)):
        return float(value)
    if want is bool and (type(value) is bool or text and value.lower() in ("true", "false")):
        return str(value).lower() == "true"
    if want is str and text and value != "???" and "\0" not in value:
        return value  # OmegaConf reads ??? as "no value given"; no file name holds a zero byte
    raise ValueError(value)


def load_yaml(file):
    """The flat keys of a config file. UserError where it is missing or is not `key: value` lines."""
    try:
        text = io.StringIO(read_bytes(file).decode())
        values = OmegaConf.to_container(OmegaConf.load(text), resolve=False)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"config={file} cannot be read: {getattr(e, 'strerror', None) or 'not a text file'}") from e
    except Exception as e:      # the YAML parser has many kinds of errors, all of them about this file
        raise UserError(f"config={file} is not valid YAML: {' '.join(str(e).split())[:200]}") from e
    if not isinstance(values, dict) or any(isinstance(v, (dict, list)) for v in values.values()):
        raise UserError(f"config={file} must hold flat `key: value` lines")
    return values


def model_module(name):
    """The module model_<name>.py; UserError with the names there are."""
    names = sorted(p.stem.removeprefix("model_") for p in HERE.glob("model_*.py"))
    if name not in names:
        raise UserError(f"model={name} is unknown: {', '.join(names)}")
    return importlib.import_module(f"model_{name}")


# ---------------------------------------------------------------------------------------------------------
# files and names

def check_name(name, what="name") -> str:
    """Names of data sets, runs and shards cannot leave their folder: no separators, no leading dot."""
    if not NAME.fullmatch(name) or len(name) > 200:
        raise UserError(f"{what} {name!r:.60} is not allowed: letters, digits and . _ + - (200 at most), "
                        "a letter or digit first")
    return name


def read_bytes(path) -> bytes:
    """What a file holds. OSError for a pipe or a device too: reading it may never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def sync_folder(folder):
    """Makes a rename inside folder survive a power cut. (Windows cannot open folders, and needs no such call.)"""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


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
