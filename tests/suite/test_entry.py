"""`pip install 'nsa[test]'`, then `pytest --pyargs nsa.testing.suite` in any folder: `nsa_pytest` at work.

Installed means here: a folder on PYTHONPATH with a copy of the package and the metadata that pip would write. The
copy has a small suite of its own in the place of the one that ships.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
import warnings

import pytest

import nsa_pytest
from nsa.testing import benchmarks, fixtures, shipped

from .small_project import ROOT, lay_out, outcome, replayed, write
from .test_package import ENTRY_POINTS

CALLS = 1000  # functions that may run: about a millisecond

PARITY = """
import os, warnings
import pytest
from nsa.testing import interpreter
from nsa.testing.contestants.named import load
from nsa.testing.judge import addresses

warnings.warn("Synchronization debug mode is a prototype feature", UserWarning)

def test_mark_lane_and_contestant(request, lane):
    assert [mark.name for mark in request.node.iter_markers()] == ["parity"]
    assert (lane, os.environ["TRITON_INTERPRET"], os.environ["NSA_PROBE"]) == ("interpreter", "1", "never")
    assert (interpreter.quicken.cache_info().currsize, addresses.watch.cache_info().currsize) == (1, 1)
    assert load(request.config.getoption("nsa_impl")[0]).lse

def test_warning():
    warnings.warn("of a test", RuntimeWarning)

@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_own_mark():
    warnings.warn("of a test", RuntimeWarning)

def test_exempt():
    warnings.warn("Synchronization debug mode is a prototype feature", UserWarning)
"""
FIXTURES = """
import hypothesis
from hypothesis import given, strategies
from hypothesis.internal.conjecture import engine

from nsa.testing import profiles
from nsa.testing.fixtures import *
from nsa.testing.fixtures import over
from nsa.testing.judge import addresses
from nsa.testing.matrix.case import Case

CASE = Case(2, 16, 16, 24, 6, "mixed", "fp32", HKV=2, S=3, S_kv=40)

@over([CASE])
def test_fixtures(case, problem, oracle, device, lane):
    assert (case, device.type, lane, oracle.problem) == (CASE, "cpu", "interpreter", problem)
    assert addresses.checking

calls = []

@profiles.drawing(0.01)
@given(strategies.integers())
def test_drawn(number):
    assert engine.MAX_SHRINKING_SECONDS == profiles.SHRINK_SECONDS
    calls.append(number)

def test_as_many_calls_as_the_profile_says(request):
    profile = request.config.getoption("hypothesis_profile") or "ci"
    assert len(calls) == max(1, profiles.EXAMPLES[profile] // 100)
"""
MODULE_MARK = """
import warnings
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

def test_mark_of_the_module():
    warnings.warn("of a test", RuntimeWarning)
"""
SUITE = {
    "__init__.py": "",
    "parity/__init__.py": "",
    "parity/test_a.py": PARITY,
    "parity/test_b.py": MODULE_MARK,
    "edge/__init__.py": "",
    "edge/test_c.py": "def test_deselected():\n    assert False\n",
    "perf/__init__.py": "",
    "perf/test_fixtures.py": FIXTURES,
}
SHIPPED = ("--pyargs", "nsa.testing.suite", "-m", "parity", "--nsa-impl", "mine:attend")
PASSED, FAILED = 4, 1  # of the tests above, in parity


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package and its module for pytest, not installed: no metadata says that there is a plugin."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "nsa", folder / "nsa", ignore=shutil.ignore_patterns("__pycache__", "suite"))
    shutil.copy(ROOT / "nsa_pytest.py", folder)
    write(folder / "nsa/testing/suite", SUITE)
    return folder


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """What pip would write beside them. The entry point has the name of the one in the environment, if that has one."""
    folder = tmp_path_factory.mktemp("metadata")
    files = {"METADATA": "Metadata-Version: 2.1\nName: nsa\nVersion: 0.1.0\n", "entry_points.txt": ENTRY_POINTS}
    files["RECORD"] = "nsa/__init__.py,,\nnsa_pytest.py,,\n"
    write(folder / "nsa-0.1.0.dist-info", files)
    return folder


def environment(*folders):
    """This process's environment, as it is outside of the suite, with these folders on the import path."""
    ours = ("NSA_", "TRITON_", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "NSA_TEST_TRITON_SEL": "0"}


@pytest.fixture
def installed(site, metadata):
    return environment(metadata, site)


@pytest.fixture
def folder(tmp_path):
    """An empty folder with a kernel."""
    empty = tmp_path / "stranger"
    write(empty, {"mine.py": "def attend(q, k, v, *, ranges, causal, scale, return_lse=False):\n    return q\n"})
    return empty


def ran(done):
    """All of the small suite's parity, and no more."""
    assert outcome(done) == {"passed": PASSED, "failed": FAILED}, done.stdout + done.stderr
    assert re.search(r"^FAILED \S*test_a.py::test_warning - RuntimeWarning: of a test", done.stdout, re.M), done.stdout


# --- the suite, installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_shipped_suite_runs_in_an_empty_folder_and_is_replayed(run_pytest, folder, installed, workers):
    """A failure, by the line as it is printed. The command `pytest` leaves the current folder out of sys.path."""
    installed["PYTHONSAFEPATH"] = "1"
    first = run_pytest(*SHIPPED, "-n", workers, cwd=folder, environment=installed)
    ran(first)
    words = replayed(first, "::test_warning")
    if workers == "1":
        return  # the same command
    again = run_pytest(*words, cwd=folder, environment=installed)
    assert outcome(again) == {"failed": 1}, again.stdout
    assert replayed(again, "::test_warning") == words


LAX = "python_files = check_*.py\npython_functions = check_*\nfilterwarnings = ignore\n"
STRICT = "filterwarnings = error\naddopts = --strict-markers --strict-config\n"
THEIRS = """
import warnings

def {0}_theirs(request):
    assert list(request.node.iter_markers()) == []
    warnings.warn("of a test", RuntimeWarning)
"""


@pytest.mark.parametrize(("ini", "file", "fails"), [(LAX, "check", 0), (STRICT, "test", 1)], ids=["lax", "strict"])
def test_another_projects_settings_are_for_its_own_tests(run_pytest, folder, installed, ini, file, fails):
    write(folder, {"pytest.ini": f"[pytest]\n{ini}", f"perf/{file}_theirs.py": THEIRS.format(file)})
    arguments = ["--pyargs", "nsa.testing.suite.parity", "perf", "--nsa-impl", "mine:attend"]
    nothing_to_save = "--benchmark-save=x"  # of which pytest-benchmark warns when the run ends
    done = run_pytest(*arguments, nothing_to_save, cwd=folder, environment=installed)
    assert outcome(done) == {"passed": PASSED + 1 - fails, "failed": FAILED + fails}, done.stdout + done.stderr
    assert ("FAILED perf/test_theirs.py" in done.stdout) == bool(fails)


CONFTEST = """
import hypothesis
import pytest
from hypothesis.internal.conjecture import engine

hypothesis.settings.register_profile("theirs", max_examples=7)
hypothesis.settings.register_profile("ci", max_examples=8)
hypothesis.settings.load_profile("theirs")
SECONDS = engine.MAX_SHRINKING_SECONDS

@pytest.fixture
def device():
    return "theirs"

lane = case = problem = oracle = contestant = publish = by_hand = sampling = machine_sampling = device
"""
USERS = """
import hypothesis
import pytest
from hypothesis.internal.conjecture import engine
from nsa.testing.judge import addresses

@pytest.fixture(autouse=True)
def as_alone(request):
    assert not addresses.checking
    assert "compiled_ahead" not in request.fixturenames

@pytest.mark.gpu(count=2)
def test_theirs(device, lane, case, problem, oracle, contestant, publish, by_hand, sampling, machine_sampling):
    assert {device, lane, case, problem, oracle, contestant, publish, by_hand, sampling, machine_sampling} == {"theirs"}

@pytest.mark.contested
@pytest.mark.parametrize("case", (x for x in (1, 2)))
def test_iterated_once(case):
    assert case in (1, 2)

def test_profiles():
    from conftest import SECONDS
    assert engine.MAX_SHRINKING_SECONDS == SECONDS
    assert hypothesis.settings().max_examples == 7
    assert hypothesis.settings.get_profile("ci").max_examples == 8

@pytest.mark.parity
def test_fails():
    assert False
"""


@pytest.mark.parametrize("profile", [[], ["--hypothesis-profile", "deep"]], ids=["none", "deep"])
def test_another_projects_fixtures_and_profiles_are_for_its_own_tests(run_pytest, folder, installed, profile):
    """Their files may be called as ours. A run with `deep` writes nothing, so the folder may be write-protected."""
    files = {"conftest.py": CONFTEST, "tests/perf/test_training.py": USERS, "tests/perf/test_sweep.py": USERS}
    write(folder, files | {".hypothesis": "a file, so that the folder of that name cannot be made"})
    chosen = ["--pyargs", "nsa.testing.suite.perf", "tests", "--nsa-impl", "mine:attend", "--import-mode=importlib"]
    done = run_pytest(*chosen, *profile, cwd=folder, environment=installed)
    assert outcome(done) == {"passed": 3 + 2 * 4, "failed": 2}, done.stdout + done.stderr
    assert "replay one failure" not in done.stdout, "the tests that fail are theirs"


THEIR_OWN = ["nsa/__init__.py", "src/nsa.py"]


@pytest.mark.parametrize("file", THEIR_OWN)
def test_another_package_of_that_name_is_refused_in_one_line(run_pytest, folder, installed, site, file):
    write(folder, {file: "", "pytest.ini": "[pytest]\n"})
    done = run_pytest(*SHIPPED, cwd=folder, environment=installed)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    found = folder / file if file == THEIR_OWN[0] else site / "nsa/__init__.py"
    [line] = done.stderr.strip().splitlines()
    assert line == (
        f"ERROR: two packages are called nsa: the suite needs its own, this project has {folder / file}, and "
        f"`import nsa` finds {found}: rename the project's, or run the suite in a folder outside of that project"
    )


def test_modules_of_the_suite_have_the_fixtures_of_their_tests():
    """A fixture of a module precedes one of the same name in a project's conftest.py."""
    for file in shipped.SUITE.glob("*/test_*.py"):
        module = importlib.import_module(".".join(("nsa.testing.suite", file.parent.name, file.stem)))
        names = fixtures.__all__ + (benchmarks.__all__ if file.parent.name == "perf" else [])
        found = {name: getattr(module, name, None) for name in names}
        given = {name: getattr(benchmarks if name in benchmarks.__all__ else fixtures, name) for name in names}
        assert found == given, file


def test_warnings_of_the_suite_can_be_allowed_by_hand(run_pytest, folder, installed):
    done = run_pytest(*SHIPPED, "-W", "ignore:of a (test:", cwd=folder, environment=installed)
    ran(done)
    done = run_pytest(*SHIPPED, "-W", "ignore:of a test:RuntimeWarning", cwd=folder, environment=installed)
    assert outcome(done) == {"passed": PASSED + FAILED}


BY_HAND = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
WORKERS = ("-p", "nsa_pytest", "-p", "pytest_benchmark.plugin", "-p", "xdist.plugin", "-n", "1")
WAYS = {  # files, environment, arguments
    "ini": ({"pytest.ini": f"[pytest]\naddopts = {' '.join(SHIPPED)}\n"}, {}, ()),
    "environment": ({}, {"PYTEST_ADDOPTS": " ".join(SHIPPED)}, ()),
    "file": ({"words": "\n".join(SHIPPED)}, {}, ("@words",)),
    "named twice": ({}, {}, (*SHIPPED, "-p", "nsa_pytest", "-p", "nsa.testing.plugin")),
    "named": ({}, BY_HAND, (*SHIPPED, "-p", "nsa_pytest")),
    "named with workers": ({}, BY_HAND, (*SHIPPED, *WORKERS)),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_ask_for_the_suite(run_pytest, folder, installed, way):
    files, environment, arguments = WAYS[way]
    write(folder, files)
    ran(run_pytest(*arguments, cwd=folder, environment=installed | environment))


def test_without_autoload_it_is_named(run_pytest, folder, installed):
    runs = [SHIPPED, (*SHIPPED, *WORKERS, "--nsa-csv", "x.csv")]
    nothing, refused = run_pytest.each(runs, cwd=folder, environment=installed | BY_HAND)
    assert nothing.returncode == refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --nsa-impl" in nothing.stderr
    assert "--nsa-csv needs benchmarks, and under xdist there are none" in refused.stderr


@pytest.mark.parametrize("interpret", ["", "1"], ids=["to-compile", "to-interpret"])
def test_triton_that_was_imported_before_is_refused(run_pytest, folder, installed, interpret):
    """Unless it was imported to interpret. The stand-in would not survive quickening, so no test runs."""
    write(folder, {"early.py": "import sys, types\nsys.modules['triton'] = types.ModuleType('triton')\n"})
    arguments = [*SHIPPED, "-p", "early", "--collect-only", "-k", "no_such_test"]
    done = run_pytest(*arguments, cwd=folder, environment=installed | {"TRITON_INTERPRET": interpret})
    if interpret:
        assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
        return
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("ERROR: Triton was imported before the suite chose its lane")
    assert len(lines) <= 3


# --- a checkout -------------------------------------------------------------------------------------------------------

REGISTERED = """
def test_once(request, lane):
    config = request.config
    assert config.pluginmanager.hasplugin("nsa.testing.plugin")
    assert len([line for line in config.getini("markers") if line.startswith("parity:")]) == 1
    assert config.pluginmanager.hasplugin("nsa_pytest") == {entry}
    assert [mark.name for mark in request.node.iter_markers()] == ["parity"]
"""


@pytest.mark.parametrize(("entry", "words"), [
    (True, []), (True, ["--nsa-seed", "7"]), (True, ["--nsa-seed", "7", "-n", "1"]), (False, ["--nsa-seed", "7"]),
], ids=["editable-plain", "editable-option", "editable-xdist", "not-installed"])  # fmt: skip
def test_a_checkout_registers_the_plugin_once(run_pytest, tmp_path, site, metadata, entry, words):
    """Its root conftest.py does, and where it is installed, the entry point, too."""
    lay_out(tmp_path, {"tests/parity/test_once.py": REGISTERED.format(entry=entry)})
    path = [metadata, site] if entry else [site]
    words = words if entry else [*words, "-p", "no:nsa_pytest"]  # the environment of this test may have installed it
    done = run_pytest(*words, "-m", "parity", cwd=tmp_path, environment=environment(*path))
    assert outcome(done) == {"passed": 1}, done.stdout + done.stderr
    assert done.stdout.count("nsa lane:") == 1


# --- not asked for ----------------------------------------------------------------------------------------------------

UNASKED = """
import importlib, json, os, sys, warnings
import pytest

def calls(f):
    counted = []  # functions of Python that run, the import system aside
    outside = lambda frame: "importlib" not in frame.f_code.co_filename
    sys.setprofile(lambda frame, event, _: event == "call" and outside(frame) and counted.append(1))
    try:
        f()
    finally:
        sys.setprofile(None)
    return len(counted)

def state():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept, list(sys.path), list(sys.meta_path), list(warnings.filters), loaded("torch", "nsa", "triton", "numpy")

def loaded(*names):
    return [name for name in names if name in sys.modules]

class Probe:
    def pytest_load_initial_conftests(self, early_config, parser, args):
        import nsa_pytest
        assert early_config.pluginmanager.hasplugin("nsa_pytest"), "it is not installed here"
        before = state()
        found["hook"] = calls(lambda: nsa_pytest.pytest_load_initial_conftests(early_config, parser, args))
        assert state() == before

    def pytest_sessionfinish(self, session):
        config = session.config
        found["plugins"] = [n for n, _ in config.pluginmanager.list_name_plugin() if n.startswith("nsa")]
        found["marks"] = [line for line in config.getini("markers") if line.startswith(("parity", "edge", "perf"))]

def imported():
    sys.modules.pop("nsa_pytest", None)
    importlib.import_module("nsa_pytest")

before = state()
found = {"import": calls(imported)}
assert state() == before
found["status"] = pytest.main(["perf"], plugins=[Probe()])
found["modules"] = loaded("torch", "nsa", "triton")  # another plugin may import NumPy
print(json.dumps(found))
"""


def test_a_run_that_does_not_ask_pays_nothing(tmp_path, installed):
    """Their folder may be called as one of ours, and their tests may warn."""
    write(tmp_path, {"perf/test_theirs.py": THEIRS.format("test")})
    command = [sys.executable, "-c", UNASKED]
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    cost = found.pop("import") + found.pop("hook")
    assert found == {"plugins": ["nsa_pytest"], "marks": [], "status": 0, "modules": []}, done.stdout
    assert 0 < cost < CALLS, cost


@pytest.mark.parametrize("asked", [[], ["--nsa-seed", "7"]], ids=["not-asked", "asked"])
def test_the_library_keeps_its_own_assertions(run_pytest, tmp_path, installed, asked):
    """pytest would rewrite them all, in every distribution that has a plugin, and they are on hot paths."""
    text = "import nsa.call\ndef test_a():\n    assert 'Rewriting' not in type(nsa.call.__loader__).__name__\n"
    write(tmp_path, {"test_a.py": text})
    done = run_pytest(*asked, cwd=tmp_path, environment=installed)
    assert outcome(done) == {"passed": 1}, done.stdout


# --- how it decides ---------------------------------------------------------------------------------------------------


def config(**options):
    return types.SimpleNamespace(option=argparse.Namespace(**options), rootpath=ROOT)


ASKING = (
    "--nsa-impl=mine:attend", "nsa.testing.suite", "nsa.testing.suite.parity.test_a::test_b[x]",
    "../site-packages/nsa/testing/suite/parity/test_a.py::test_b", "--deselect=nsa/testing/suite/edge",
)  # fmt: skip
OTHERS = ("--nsa", "--no-nsa-x", "-mparity", "nsa.testing", "tests/unsa.testing.suites", "nsa.testing.suites")


@pytest.mark.parametrize("word", ASKING + OTHERS)
def test_arguments_that_ask_for_the_suite(word):
    assert nsa_pytest._asked(config(), None, ["-q", word]) == (word in ASKING)


def test_a_parents_options_ask_for_the_suite():
    """Some releases of xdist start a worker with them, and without the arguments that were in addopts."""
    assert nsa_pytest._asked(config(nsa_impl=[]), None, [])
    assert not nsa_pytest._asked(config(verbose=1), None, [])


def test_a_warning_of_an_import_does_not_end_a_strict_project(monkeypatch, tmp_path):
    monkeypatch.setattr(nsa_pytest, "_register", lambda config: warnings.warn("of torch", DeprecationWarning, 2))
    monkeypatch.setattr(sys, "path", [*sys.path])
    early = config(nsa_impl=[])
    early.pluginmanager = types.SimpleNamespace(rewrite_hook=None)
    early.invocation_params = types.SimpleNamespace(dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        nsa_pytest.pytest_load_initial_conftests(early, None, [])
    assert [str(warning.message) for warning in caught] == ["of torch"]
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize("module", ["filelock", "pytest_benchmark"])
def test_without_the_extra_it_says_what_to_install(monkeypatch, module):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    said = f"nsa.testing.suite needs {nsa_pytest.NEEDS[module]}: pip install 'nsa[test]'"
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(said)}$"):
        nsa_pytest._register(config())


def test_an_older_checkout_is_left_to_its_own_conftest(monkeypatch):
    """`--nsa-against` runs one in this environment."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nsa.testing.lane" else find(name))
    nsa_pytest._register(config())  # which has no pluginmanager
