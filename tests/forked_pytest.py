"""
Runs of pytest in other folders, each in a process of its own; test_planted_bugs.py starts this one.

Each line of stdin asks for a run: [folder, pytest's arguments, environment] as JSON. Each is answered by a line with
its exit status (-9: stopped after 300 seconds). What it prints goes to <folder>.out and <folder>.err. The end of stdin
stops a run.

A fresh Python spends seconds on importing torch. This process imports such libraries once, nothing of the project, and
forks every run from itself. It never computes: a fork after OpenMP has run would hang.
"""
import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from pathlib import Path

FORKS = sys.platform == "linux"     # torch may break in forks on macOS: there, each run is a fresh Python
LIBRARIES = "torch._dynamo", "hypothesis", "matplotlib.pyplot", "omegaconf", "pytest", "tqdm", "triton"
SECONDS = 300
BROKEN = 70                         # the exit status of a run that did not get as far as pytest's


def preload():
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:         # what is not installed, the tests do without
            pass
    gc.collect()
    gc.freeze()                     # or else every run would collect, and so copy, all the libraries' memory


def imported(folder):
    """{name: its file} of the modules in memory that bear the name of a file of the folder's project."""
    names = {path.stem for path in (*folder.glob("*.py"), *folder.glob("tests/*.py"))}
    return {name: Path(sys.modules[name].__file__) for name in names & sys.modules.keys()}


def pytest_here(arguments):
    """`python -m pytest <arguments>` in this process; its exit status. All of the project comes from this folder."""
    folder = Path.cwd()
    assert not imported(folder), imported(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["pytest", *arguments]
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert all(folder in file.parents for file in imported(folder).values()), imported(folder)
        return int(end.code)


def run(folder, arguments, environment):
    """In a process of its own: `python -m pytest <arguments>` in the folder. Ends the process."""
    os.setsid()                     # whatever the tests start can be killed with them
    os.chdir(folder)
    for number, path in enumerate((os.devnull, f"{folder}.out", f"{folder}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    if environment or not FORKS:    # what a library reads when it is imported must be there before
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], {**os.environ, **environment})
    status = BROKEN
    try:
        status = pytest_here(arguments)
    except BaseException:
        traceback.print_exc()
    finally:                        # without the slow end of an interpreter that has imported so much
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def stop(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:      # it has yet to become a group
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main():
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            run(*json.loads(line))
        done, end = 0, time.monotonic() + SECONDS
        while not done and time.monotonic() < end and not select.select([sys.stdin], [], [], 0.02)[0]:
            done, status = os.waitpid(pid, os.WNOHANG)
        print(os.waitstatus_to_exitcode(status if done else stop(pid)), flush=True)


if __name__ == "__main__":
    del sys.path[0]                 # the tests of this checkout
    if FORKS:
        preload()
    main()
