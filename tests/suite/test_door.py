"""`pytest_plugins = ["nsa.testing.plugin"]`, and `over` alone: the matrix in other people's tests."""

import pytest

from .small_project import off_gpu, outcome, write
from .test_docs import PROVING, fenced

PLUGIN = 'pytest_plugins = ["nsa.testing.plugin"]\n'
PAGE = {text[2 : text.index("\n")]: text for _, _, text in fenced(PROVING) if text.startswith("# ")}
"""The files of the example in docs/proving.md."""
HEADER = "nsa lane: CPU: Triton interpreter, fp32/fp16 on small shapes"


@pytest.fixture
def project(run_pytest, tmp_path):
    """`project(files, *arguments)`: pytest in a folder with these files alone."""

    def run(files, *arguments, **environment):
        write(tmp_path, files)
        return run_pytest("-p", "no:cacheprovider", *arguments, cwd=tmp_path, environment=off_gpu(**environment))

    return run


@pytest.mark.parametrize(("files", "arguments", "passed"), [
    (("conftest.py", "test_mine.py"), (), 7),
    (("test_mine.py",), ("-k", "case"), 1),
    (("test_mine.py",), ("-p", "nsa_pytest", "--nsa-seed", "0", "-k", "case"), 1),
], ids=["plugin", "over-alone", "entry-point"])  # fmt: skip
def test_the_example_of_the_page(project, files, arguments, passed):
    """The kernel is a Triton kernel, so it runs only if the lane was chosen in time."""
    assert PAGE["conftest.py"].endswith(PLUGIN)
    done = project({name: PAGE[name] for name in files}, *arguments)
    assert outcome(done)["passed"] == passed, done.stdout + done.stderr
    assert done.returncode == 0
    assert (HEADER in done.stdout.splitlines()) == ("conftest.py" in files or "--nsa-seed" in arguments)


IMPORTS = "import triton\nfrom nsa.testing.fixtures import over\n"
EARLY = {"conftest": {"conftest.py": f"import triton\n{PLUGIN}", "test_a.py": ""}, "module": {"test_a.py": IMPORTS}}


@pytest.mark.parametrize("where", EARLY)
def test_triton_before_the_lane_is_refused_in_one_line(project, where):
    done = project(EARLY[where])
    said = [line for line in (done.stdout + done.stderr).splitlines() if "Triton was imported before" in line]
    assert len(said) == 1
    assert "set TRITON_INTERPRET=1, or write pytest_plugins" in said[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert HEADER not in done.stdout
    if where == "conftest":
        assert HEADER in project({}, TRITON_INTERPRET="1").stdout.splitlines()


OVER = "from nsa.testing.fixtures import contested, over\nfrom nsa.testing.matrix.case import Case\n"
CASE = 'Case(2, 16, 16, 24, 6, "mixed", "fp32", HKV=2, S=3, S_kv=40)'
MISUSES = {
    "def test_a(problem): pass": "the fixtures case, problem and oracle need cases: write @over(...) above the test",
    f"{OVER}@over([{CASE}])\ndef test_a(device): pass": "is marked by over: give it the argument case, problem or ",
    f"{OVER}@over(['H8'])\ndef test_a(case): pass": "over: expected a list of nsa.testing.matrix.case.Case or a ",
    f"{OVER}@contested(list)\ndef test_a(case): pass": "is marked by contested: give it the argument contestant",
}


def test_each_misuse_is_one_line(project):
    files = {f"test_{i}.py": text for i, text in enumerate(MISUSES)}
    done = project(files | {"conftest.py": PLUGIN}, "-rN", "--continue-on-collection-errors")
    assert outcome(done) == {"errors": len(MISUSES)}
    lines = done.stdout.splitlines()
    for said in MISUSES.values():
        [at] = [i for i, line in enumerate(lines) if said in line]
        assert lines[at - 1].startswith("____"), "nothing stands between the heading and the line"
        assert lines[at + 1].startswith(("____", "====")), "nothing stands below it"


def test_fixtures_of_a_project_precede(project):
    """One by one: `problem` needs none of the suite's names but `case`."""
    theirs = "import pytest\n@pytest.fixture\ndef device():\n    return 'theirs'\n"
    theirs += "@pytest.fixture\ndef oracle(problem):\n    return problem.case, 'theirs'\n"
    test = f"def test_a(device, problem, oracle):\n    assert (device, oracle) == ('theirs', ({CASE}, 'theirs'))\n"
    done = project({"conftest.py": PLUGIN, "test_a.py": f"{OVER}{theirs}\n@over([{CASE}])\n{test}"})
    assert outcome(done) == {"passed": 1}, done.stdout
