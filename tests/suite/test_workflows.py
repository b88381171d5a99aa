"""The workflows have the shape that GitHub accepts, and run what exists."""

import ast
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from nsa.testing import profiles
from nsa.testing.compile import budgets, matrix

from .small_project import ROOT, lay_out

FILES = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS = {name: yaml.safe_load(path.read_text()) for name, path in FILES.items()}  # YAML 1.1 reads `on` as true
SECONDS_A_CALL = 0.3  # to draw and check one, in the interpreter: the mean of all tests that draw, on one core
SCHEMA = ("--builtin-schema", "vendor.github-workflows")  # GitHub's, which the package ships
EXPRESSION = r" (github|matrix|inputs|secrets|needs|env|runner)(\.[\w-]+)+ "
INPUTS = {"boolean": bool, "string": str, "number": int, "choice": str}


def check(*paths):
    """What GitHub's schema says of workflows."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", *SCHEMA, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def problems(text):
    """What the schema does not know."""
    document = yaml.safe_load(text)
    found = [f"expression {x}" for x in re.findall(r"\$\{\{(.*?)\}\}", text) if not re.fullmatch(EXPRESSION, x)]
    found += ["an expression is not closed"] * (text.count("${{") != text.count("}}"))
    events = document.get(True)
    asked = events.get("workflow_dispatch") if isinstance(events, dict) else None
    for name, spec in ((asked or {}).get("inputs") or {}).items():
        if not isinstance(spec.get("default"), INPUTS.get(spec.get("type"), ())):
            found.append(f"input {name}: expected a known type and a default of it")
    for name, job in document["jobs"].items():
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        found += [f"{name}: needs {other}" for other in needs if other not in document["jobs"]]
        found += [f"{name}: no timeout-minutes"] * ("timeout-minutes" not in job)
        for step in job.get("steps", []):
            if "uses" in step and not re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|[0-9a-f]{40})", step["uses"]):
                found.append(f"{name}: expected owner/action@version, got {step['uses']}")
            found += [f"{name}: with belongs to uses"] * ("with" in step and "uses" not in step)
    return found


def runs(name):
    return [step["run"] for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"] if "run" in step]


def syntax_error(script):
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


def test_workflows_have_the_shape_github_accepts():
    """Ours, and those that users copy."""
    files = [*FILES.values(), *(ROOT / "examples" / "workflows").iterdir()]
    done = check(*files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name: problems(path.read_text()) for path in files} == {path.name: [] for path in files}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_runs_scripts_that_exist(name):
    for run in runs(name):
        assert "${{" not in run, "untrusted text must not become part of a script: pass it in env"
        assert syntax_error(run) == ""
        for script in re.findall(r"\.ci/\w+", run):
            assert os.access(ROOT / script, os.X_OK), f"expected {script} to be executable"
            assert syntax_error((ROOT / script).read_text()) == ""


def test_both_lanes_have_a_workflow():
    assert set(WORKFLOWS) == {"ci", "gpu", "nightly"}
    ci, gpu = WORKFLOWS["ci"], WORKFLOWS["gpu"]
    assert {"push", "pull_request"} <= ci[True].keys()
    assert ".ci/run" in runs("ci")
    assert set(gpu[True]) == {"workflow_dispatch"}
    assert gpu["jobs"]["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    steps = {step.get("uses", "").partition("@")[0]: step for job in gpu["jobs"].values() for step in job["steps"]}
    up, down = (steps[f"actions/{way}-artifact"] for way in ("upload", "download"))
    assert up["if"] == "always()"  # a red gate needs its report most
    assert up["with"]["name"] == down["with"]["name"]
    assert f".ci/gpu {up['with']['path']}" in runs("gpu")
    assert gpu["jobs"]["propose"]["permissions"] == {"contents": "write", "pull-requests": "write"}
    [propose] = [run for run in runs("gpu") if "gh pr create" in run]
    assert f"cp {up['with']['path']}/gpus/*.yaml nsa/configs/gpus/" in propose
    assert '-exec cp {} "$out/gpus/"' in (ROOT / ".ci" / "gpu").read_text()


def test_ci_runs_the_commands_of_readme():
    """As README prints them, in a copy of the tree that has no environment of git."""
    readme, script = ((ROOT / name).read_text() for name in ("README.md", ".ci/run"))
    section = readme.partition("## Set up and prove it")[2].partition("```")[2].partition("```")[0]
    commands = [line.partition("#")[0].strip() for line in section.strip().splitlines()]
    assert commands == ["make perf", "make test"]
    lines = script.splitlines()
    assert [line for line in lines if line in commands] == commands
    assert lines.index('cd "$copy"') < lines.index(commands[0])
    assert runs("ci")[0] == ".ci/run"


PLUGINS = ("asyncio", "codspeed", "cov", "randomly", "rerunfailures", "timeout")  # and xdist, which our extra has


def test_every_lane_runs_beside_other_plugins():
    """In a checkout and in another project. Here the plugins are not installed; `test_beside.py` does what they do."""
    [step] = [step for step in WORKFLOWS["ci"]["jobs"]["plugins"]["steps"] if "run" in step]
    assert step["run"] == ".ci/plugins"
    script = (ROOT / ".ci" / "plugins").read_text()
    assert sorted(re.findall(r"pytest-(\w+)", script)) == list(PLUGINS)
    lanes = re.findall(r'^"\$PYTHON" -m pytest ("\$\{suite\[@\]\}" )?-m (\w+)', script, re.M)
    assert lanes == [(where, lane) for where in ("", '"${suite[@]}" ') for lane in ("parity", "edge", "perf")]


def test_a_pull_request_is_gated_against_its_base():
    """On the runner itself: no stored baseline fits it. The base commit has to be in the clone."""
    ci = WORKFLOWS["ci"]
    job = ci["jobs"]["gate"]
    assert job["if"] == "github.event_name == 'pull_request'"
    [checkout] = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout")]
    assert checkout["with"]["fetch-depth"] == 0
    [step] = [step for step in job["steps"] if "run" in step]
    assert step == {"run": 'make gate BASE="origin/$TARGET"', "env": {"TARGET": "${{ github.base_ref }}"}}
    dry = subprocess.run(
        ["make", "-n", "gate", "BASE=origin/x", "PYTHON=python"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert dry.stdout.strip() == "python -m pytest -m perf --nsa-against origin/x"


def test_script_for_gpu_boxes_does_every_step():
    script = (ROOT / ".ci" / "gpu").read_text()
    for words in (
        '-m "parity or edge or suite"', "-m edge -k another_gpu", "nsa.testing.sanitize", "--benchmark-compare",
        "--nsa-update-thresholds", "nsa/configs/gpus", "--nsa-report", "--junitxml",
    ):  # fmt: skip
        assert words in script


MEASURED = "--nsa-update-thresholds"  # of the report, only where it is written
WRITTEN = ("--junitxml", "--benchmark-json", "--nsa-report", "$out")


def drawn():
    """The tests that draw calls, `file::name`."""
    return {
        f"{path.relative_to(ROOT)}::{test.name}"
        for path in ROOT.glob("tests/**/test_*.py")
        for test in ast.parse(path.read_text()).body
        if isinstance(test, ast.FunctionDef) and any("given(" in ast.unparse(x) for x in test.decorator_list)
    }


@pytest.fixture(scope="module")
def collected(run_pytest, tmp_path_factory):
    """The tests that each pytest of `.ci/gpu` and of the nightly workflow selects, after the words of its command.

    To collect all tests takes long. So the first command has a tree of the same files, which hold a test each, and the
    others collect the files that have their tests.
    """
    tree = tmp_path_factory.mktemp("tree")
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    lay_out(tree, dict.fromkeys(files, "def test_a():\n    pass\n"))
    text = (ROOT / ".ci" / "gpu").read_text().replace("\\\n", " ").replace('"${measured[@]}"', MEASURED)
    commands = [line.strip() for line in text.splitlines() if line.strip().startswith('"$PYTHON" -m pytest')]
    commands.append(WORKFLOWS["nightly"]["jobs"]["drawn"]["steps"][-1]["run"])
    commands = [shlex.split(command.partition("||")[0])[3:] for command in commands]
    runs = [[word for word in words if not word.startswith(WRITTEN)] for words in commands]
    where = ([], ["tests/edge/calls/test_concurrency.py"], ["tests/perf"], [], {x.partition("::")[0] for x in drawn()})
    how = ["-n", "0", "--collect-only", "-q", "-p", "no:cacheprovider"]
    runs = [[*words, *files, *how] for words, files in zip(runs, where, strict=True)]
    seen = run_pytest.each(runs[:1], cwd=tree, environment=os.environ | {"PYTHONPATH": str(ROOT)})
    seen += run_pytest.each(runs[1:], cwd=ROOT)
    assert all(done.returncode == 0 for done in seen), [done.stdout[-500:] + done.stderr for done in seen]
    return [
        (words, [line for line in done.stdout.splitlines() if "::" in line])
        for words, done in zip(commands, seen, strict=True)
    ]


def test_the_gpu_script_gates_core_and_training(collected):
    """Which files run is what pytest collects for the script's own words: a path in the wrong place selects others."""
    parity, _, core, training = ({line.partition("::")[0] for line in lines} for _, lines in collected[:4])
    everything = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert parity == {path for path in everything if not path.startswith("tests/perf/")}
    left_out = {f"tests/perf/test_{name}.py" for name in ("training", "shape", "sweep", "regret", "workload")}
    assert core == {path for path in everything if path.startswith("tests/perf/")} - left_out
    assert training == {"tests/perf/test_training.py"}
    for words, _ in collected[2:4]:
        assert {"--benchmark-compare", "--nsa-strict"} <= set(words)


def test_every_triton_that_must_work_compiles_the_kernels_every_night():
    nightly = WORKFLOWS["nightly"]
    assert len(nightly[True]["schedule"]) == 1
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly[True]["schedule"][0]["cron"])
    job = nightly["jobs"]["aot"]
    assert job["strategy"].keys() == {"fail-fast", "matrix"}
    assert job["strategy"]["fail-fast"] is False
    *pinned, last = job["strategy"]["matrix"]["triton"]
    assert last == "newest"
    releases = [matrix.minor(version) for version in pinned]
    assert releases == sorted(set(releases))
    # What has passed is compiled each night. A release whose record an edit of a kernel has made void is, too.
    passed = {matrix.minor(entry["triton"]) for entry in yaml.safe_load(budgets.PASSED.read_text())["passed"]}
    assert passed <= set(releases)
    assert f'"triton>={pinned[0].removesuffix(".0")};' in (ROOT / "pyproject.toml").read_text()
    (step,) = (step for step in job["steps"] if "run" in step)
    assert step["run"] == '.ci/aot "$TRITON"'
    assert step["env"]["TRITON"] == "${{ matrix.triton }}"
    assert step["env"]["PIP_EXTRA_INDEX_URL"].endswith("/cpu")  # a build of torch for CUDA pins its own Triton
    script = (ROOT / ".ci" / "aot").read_text()
    for words in ("-m venv", "-c constraints.txt", "triton==$version", "-m pytest -m aot"):
        assert words in script


def test_calls_are_drawn_at_length_every_night(collected):
    """All tests that draw, and within the hour on two cores if a call takes what it took when this was written."""
    job = WORKFLOWS["nightly"]["jobs"]["drawn"]
    make, command = (step["run"] for step in job["steps"] if "run" in step)
    assert make == "make --no-print-directory .venv/ready"
    assert command.startswith(".venv/bin/python -m pytest ")
    arguments, lines = collected[-1]
    assert arguments[arguments.index("--hypothesis-profile") + 1] == "deep"
    assert profiles.EXAMPLES["deep"] >= 10 * profiles.EXAMPLES[profiles.DEFAULT]
    assert {line.partition("[")[0] for line in lines} == drawn()
    assert len(drawn()) * profiles.EXAMPLES["deep"] * SECONDS_A_CALL / 2 < 0.8 * 60 * job["timeout-minutes"]


def test_nightly_script_asks_for_a_version():
    done = subprocess.run([ROOT / ".ci" / "aot"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "expected a version of Triton, or newest" in done.stderr


UNSHAPED = [  # what the schema finds
    ("ci", "timeout-minutes", "timeout_minutes"), ("ci", "- run: .ci/run", "- name: nothing"),
    ("ci", "pull_request:", "pullrequest:"), ("ci", "runs-on:", "runs_on:"), ("gpu", "permissions:", "permission:"),
    ("ci", "- run: .ci/run", "- run: .ci/run\n        uses: actions/checkout@v4"),
]  # fmt: skip
UNSOUND = [  # what it does not know
    ("ci", "actions/checkout@v4", "actions/checkout", "expected owner/action@version"),
    ("ci", "matrix.python }}", "matrix.python", "an expression is not closed"),
    ("ci", "matrix.python", "matrx.python", "expression"),
    ("ci", "timeout-minutes: 45", "name: x", "no timeout-minutes"),
    ("gpu", "needs: gpu", "needs: cpu", "needs cpu"),
    ("gpu", "type: boolean", "type: bool", "input propose: expected a known type"),
    ("gpu", "default: true", "default: 3", "input propose: expected a known type"),
    ("ci", "- run: .ci/run", "- run: .ci/run\n        with: {a: b}", "with belongs to uses"),
]


def test_a_broken_workflow_is_noticed(tmp_path):
    for i, (name, right, wrong, *_) in enumerate(UNSHAPED + UNSOUND):
        text = FILES[name].read_text()
        assert right in text
        (tmp_path / f"{i}.yml").write_text(text.replace(right, wrong))
    said = check(*tmp_path.iterdir())
    named = set(map(int, re.findall(r"(\d+)\.yml::\$", said.stdout)))
    assert named == set(range(len(UNSHAPED))), said.stdout + said.stderr
    for i, (*_, message) in enumerate(UNSOUND, len(UNSHAPED)):
        assert any(message in problem for problem in problems((tmp_path / f"{i}.yml").read_text())), message
