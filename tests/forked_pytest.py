"""
Runs of pytest in other folders, each in a process of its own; test_planted_bugs.py starts this one.

Each line of stdin asks for a run: [folder, pytest's arguments, environment] as JSON. Each is answered by a line with
its exit status (-14: stopped after 300 seconds). What it prints goes to <folder>.out and <folder>.err.

A fresh Python spends seconds on importing torch. This process imports such libraries once, nothing of the project, and
forks every run from itself. It never computes: a fork after OpenMP has run would hang.
"""
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress

FORKS = sys.platform == "linux"     # torch may break in forks on macOS: there, each run is a fresh Python
LIBRARIES = "torch._dynamo", "hypothesis", "matplotlib.pyplot", "omegaconf", "pytest", "tqdm", "triton"
SECONDS = 300


def run(folder, arguments, environment):
    """In a process of its own, which it ends: `python -m pytest <arguments>` in the folder."""
    os.setsid()                     # whatever the tests start can be killed with them
    signal.alarm(SECONDS)
    os.chdir(folder)
    for number, path in enumerate((os.devnull, f"{folder}.out", f"{folder}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    if environment or not FORKS:    # what a library reads when it is imported must be there before
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], {**os.environ, **environment})
    status = 70                     # of a run that did not get as far as pytest's
    try:
        sys.path.insert(0, folder)
        status = int(importlib.import_module("pytest").main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:                        # without the slow end of an interpreter that has imported so much
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    del sys.path[0]                 # the tests of this checkout
    for name in LIBRARIES * FORKS:
        with suppress(ImportError):     # what is not installed, the tests do without
            importlib.import_module(name)
    gc.collect()
    gc.freeze()                     # or else every run would collect, and so copy, all the libraries' memory
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(*json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)      # what the tests have left
        print(status, flush=True)
