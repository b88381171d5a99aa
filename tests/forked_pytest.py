"""`python -m pytest …` and other programs in forks of a process that has imported torch. Run as a script.

Each run is a process of its own with its own environment, folder and output, as if it had been started anew, but for
the seconds in which torch, pytest and `PLUGINS` are imported and everything's assertions are rewritten. `nsa` is not
imported beforehand: it reads the environment when it is. So does Triton, which was imported to interpret, and which a
run that imports it to interpret finds ready.

A request is a line of JSON, the answer a line with the exit status. A request may hold several runs, one after the
other in one process, for runs that execute no test. The exit statuses of all but the last are in files.
"""

import atexit
import gc
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import sys
import traceback

import _pytest.assertion
import _pytest.config
import filelock  # noqa: F401
import numpy  # noqa: F401
import pygments.lexers  # noqa: F401
import torch  # noqa: F401
import yaml  # noqa: F401

OTHERS = ("asyncio", "codspeed", "pytest_cov", "randomly", "rerunfailures", "timeout")
"""Plugins that an environment may have. A run has none of them, because tests expect the order and words of ours."""

PLUGINS = ("hypothesis", "pytest_benchmark.plugin")
"""What is imported beforehand of the plugins. Not xdist, which hands the import path of that time to its workers."""


class ReadyTriton:
    """On the import path, Triton as it is when TRITON_INTERPRET is set. Without that variable, all of it is imported
    anew but for its library, which a process can load once.
    """

    LIBRARY = "triton._C.libtriton"

    def __init__(self):
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("triton.runtime.interpreter")
        self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "triton"}
        self.specs = {name: self.modules[name].__spec__ for name in ("triton", self.LIBRARY)}

    def find_spec(self, name, path=None, target=None):
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        ready = name == self.LIBRARY or (name == "triton" and interpreted)
        return importlib.util.spec_from_loader(name, self) if ready else None

    def create_module(self, spec):
        return self.modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__name__]
        below = f"{module.__name__}."
        sys.modules.update({name: ready for name, ready in self.modules.items() if name.startswith(below)})


def become(request, installed):
    """What a new process would be: its environment, folder, signals and import path."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background job of a shell ignores
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if "PYTHONSAFEPATH" in os.environ else [os.getcwd()]), *folders, *installed]
    sys.path_importer_cache.clear()


def redirect(*files):
    for number, name in enumerate((os.devnull, *files)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)


def run_one(arguments):
    """`-c program …` or `-m module …`, as Python takes them."""
    how, what, *rest = arguments
    sys.argv[:] = [what if how == "-m" else "-c", *(f"-pno:{name}" for name in OTHERS if what == "pytest"), *rest]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        return 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        return end.code or 0 if isinstance(end.code, int | None) else 1
    finally:
        if not isinstance(sys.exc_info()[1], SystemExit | None):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    return 1


def run(request, installed):
    """Never returns. What is left out of Python's own end is taking torch apart object by object."""
    status = 1
    try:
        become(request, installed)
        *others, last = request["runs"]
        for number, arguments in enumerate(others):
            redirect(*(os.path.join(request["folder"], f"{name}{number}") for name in ("out", "err")))
            with open(os.path.join(request["folder"], f"status{number}"), "w") as file:
                file.write(str(run_one(arguments)))
        redirect(*(os.path.join(request["folder"], f"{name}{len(others)}") for name in ("out", "err")))
        status = run_one(last)
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def import_plugins():
    """As pytest imports each distribution that has a plugin: with assertions rewritten."""
    hook = _pytest.assertion.install_importhook(_pytest.config.get_config())
    hook.mark_rewrite("_hypothesis_globals", *(name.partition(".")[0] for name in PLUGINS))
    for name in PLUGINS:
        importlib.import_module(name)
    sys.meta_path.remove(hook)


def main():
    import_plugins()
    sys.meta_path.insert(0, ReadyTriton())
    inspect.getmodule(main.__code__)  # looks at all modules, once
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
