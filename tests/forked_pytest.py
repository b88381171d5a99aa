"""`python -m pytest …` in forks of a process that has imported torch, for tests of how pytest ends. Run as a script,
with a folder in which the forks share the bytecode of what they import.

Each run is a process of its own with its own environment, folder and output, as if it had been started anew, but for
the seconds in which torch is imported and everything's assertions are rewritten. Neither `nsa` nor Triton nor a plugin
of pytest is imported beforehand: they read the environment, or are rewritten, when they are.

A request is a line of JSON, the answer a line with the exit status.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import traceback

import numpy  # noqa: F401
import torch  # noqa: F401
import yaml  # noqa: F401


def become(request, installed):
    """What a new process would be: its environment, folder, files and import path."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(name, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [os.getcwd(), *folders, *installed]
    sys.path_importer_cache.clear()
    sys.argv[:] = ["pytest", *request["arguments"]]


def run(request, installed):
    """Never returns. What is left out of Python's own end is taking torch apart object by object."""
    become(request, installed)
    status = 1
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [folder for folder in sys.path[1:] if folder not in given]
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line), installed)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
