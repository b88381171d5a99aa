"""Which benchmarks a command selects, and options that would do nothing."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.testing import options, refusals
from nsa.testing.matrix.cases import core
from nsa.testing.plugin import current_lane
from nsa.tuning import thresholds

from .small_project import ROOT, off_gpu, outcome, write


def check(**given):
    refusals.check_values(SimpleNamespace(option=SimpleNamespace(**given)))


VALUES = (
    "nsa_against", "nsa_csv", "nsa_report", "nsa_dist", "nsa_workload", "nsa_reproduce", "benchmark_compare",
    "benchmark_storage",
)  # fmt: skip
LISTS = ("nsa_impl", "nsa_shape", "nsa_accept_drift")


def test_every_option_of_the_suite_with_a_value_is_known(pytestconfig):
    """So that this test names a new one."""
    ours = {name for name in vars(pytestconfig.option) if name.startswith("nsa_")}
    flags = {name for name in ours if isinstance(pytestconfig.getoption(name), bool)}
    numbers = {*options.SAMPLING, "nsa_regret"}
    assert ours - flags - numbers == {name for name in VALUES if name.startswith("nsa_")} | set(LISTS)
    refusals.check_values(pytestconfig)  # the defaults


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("name", [*VALUES, *LISTS, "benchmark_json"])
def test_an_empty_value_is_refused(name, empty):
    value = [empty] if name in LISTS else Path(empty.strip()) if name == "benchmark_json" else empty
    with pytest.raises(pytest.UsageError, match=f"^{options.spelled(name)}: its value is empty: type --") as raised:
        check(**{name: value, "benchmark_netrc": ""})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", refusals.NEEDS)
def test_an_option_that_needs_another_is_refused_alone(name):
    first, *others = refusals.NEEDS[name]
    unset = {"nsa_against": None, "benchmark_compare": [], "nsa_save_baseline": False, "nsa_recording": False}
    with pytest.raises(pytest.UsageError, match=f"^{options.spelled(name)} needs {options.spelled(first)}"):
        check(**unset | {name: True})
    for other in (first, *others):
        check(**unset | {name: True, other: "HEAD"})
    check(**unset | {name: False})


@pytest.mark.parametrize("name", options.SMALLEST)
def test_a_number_too_small_is_refused(name):
    least = options.SMALLEST[name]
    with pytest.raises(pytest.UsageError, match=f"^{options.spelled(name)}: expected a number of at least {least}, g"):
        check(**{name: least - 1})
    check(**{name: least})


@pytest.mark.parametrize(("words", "rootdir", "root", "ini"), [
    ("--nsa-csv out.csv", "elsewhere", "elsewhere", None),
    ("--nsa-csv out.csv", "..", "..", None),
    ("-c elsewhere/pytest.ini --nsa-csv out.csv", None, "elsewhere", "elsewhere/pytest.ini"),
    ("elsewhere --nsa-csv out.csv", None, "elsewhere", "elsewhere/pytest.ini"),
], ids=["rootdir", "rootdir above", "ini", "tests elsewhere"])  # fmt: skip
def test_a_value_that_did_not_choose_the_rootdir_is_not_refused(tmp_path, words, rootdir, root, ini):
    """`--rootdir`, `-c` or a path of tests chose it."""
    write(tmp_path, dict.fromkeys(("conftest.py", "out.csv", "elsewhere/pytest.ini"), ""))
    config = SimpleNamespace(
        option=SimpleNamespace(rootdir=rootdir), rootpath=(tmp_path / root).resolve(), inipath=ini and tmp_path / ini,
        invocation_params=SimpleNamespace(dir=tmp_path, args=words.split()), args=["elsewhere"],
    )  # fmt: skip
    refusals.check_paths(config)
    config.rootpath, config.inipath, config.option.rootdir = tmp_path.parent, None, None
    with pytest.raises(pytest.UsageError, match="write --nsa-csv=out.csv$"):
        refusals.check_paths(config)


# --- which benchmarks a command selects: those that take minutes run where they are named -----------------------------

LENGTHY = ("test_regret", "test_threshold", "test_training")  # files, and the tests in them that take minutes
# What is typed, and how many benchmarks of each it selects; True: some; 0: nothing of that file.
SELECTED = [
    (["tests/perf"], (0, 0, False)),
    (["tests/perf", "--nsa-full"], (0, 0, True)),
    (["tests/perf/test_training.py"], (0, 0, True)),
    (["tests/perf", "--nsa-regret=3"], (3, 0, False)),
    (["tests/perf", "--nsa-update-thresholds"], (0, len(thresholds.cases()), False)),
]


def test_lengthy_benchmarks_are_collected_on_request_only(run_pytest):
    """A GPU is needed to time them, not to list them: a folder that cannot be collected shows here, without one."""
    runs = [[*words, "--collect-only", "-q", "-p", "no:cacheprovider"] for words, _ in SELECTED]
    for done, (words, counts) in zip(run_pytest.each(runs, cwd=ROOT), SELECTED, strict=True):
        assert done.returncode == 0, done.stdout + done.stderr
        for name, count in zip(LENGTHY, counts, strict=True):
            listed = done.stdout.count(f"tests/perf/{name}.py::{name}[" if count else f"{name}.py")
            assert type(count)(listed) == count, (words, name, listed)


def test_tests_are_collected_without_pytests_plugin_of_warnings(run_pytest):
    """Unknown marks are errors here, and that plugin has the mark `filterwarnings`."""
    words = ("tests/parity", "-m", "parity", "-p", "no:warnings")
    done = run_pytest(*words, "--collect-only", "-q", "-p", "no:cacheprovider", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# A plugin that takes the benchmarks' setup for one of the GPU lane and ends the run where kernels would be compiled.
ON_A_GPU = """\
import pytest, torch
from nsa.testing import benchmarks
benchmarks.current_lane = lambda: "gpu"

def pytest_collection_finish():
    from nsa.testing.clock import precompile
    torch.cuda.get_device_properties = lambda device: type("Properties", (), {"total_memory": 2**36})
    precompile.WORTH = 1
    precompile.compile_ahead = lambda jobs, *_: pytest.exit(f"to compile: {sorted({case.id for _, case in jobs})}", 7)
"""


def test_all_benchmarks_of_a_run_can_be_compiled_ahead(run_pytest, tmp_path):
    """Calls of selectors are among them, which are no cases of attention."""
    write(tmp_path, {"on_a_gpu.py": ON_A_GPU})
    typed = ("-m", "perf", "-p", "no:cacheprovider", "-p", "on_a_gpu", "tests/perf/test_suite.py")
    done = run_pytest(*typed, cwd=ROOT, environment=off_gpu(tmp_path))
    assert done.returncode == 7, done.stdout + done.stderr
    assert core()[0].id in done.stdout.partition("to compile: ")[2]


@pytest.mark.skipif(current_lane() == "gpu", reason="there it is timed")
def test_named_by_path_it_skips_without_a_gpu(run_pytest):
    done = run_pytest("-q", "-p", "no:cacheprovider", "tests/perf/test_threshold.py", cwd=ROOT)
    assert (done.returncode, list(outcome(done))) == (0, ["skipped"]), done.stdout


def test_names_of_test_files_are_unique():
    """In a checkout and in the suite that ships, so that a name alone says which file is meant."""
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "nsa" / "testing" / "suite").rglob("test_*.py")]
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
