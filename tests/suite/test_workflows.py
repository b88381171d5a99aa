"""The workflows have the shape GitHub accepts, and run what exists. The rules are those of its schema that we use."""

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from nsa.testing import profiles
from nsa.testing.compile import budgets, matrix

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
TOP = {"name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
JOB = {"name", "needs", "if", "runs-on", "permissions", "env", "strategy", "timeout-minutes", "steps", "outputs"}
STEP = {"name", "id", "if", "uses", "with", "run", "env", "shell", "working-directory", "timeout-minutes"}
EVENTS = {"push", "pull_request", "workflow_dispatch", "schedule"}
INPUT = {"description", "type", "default", "required", "options"}
SECONDS_A_CALL = 0.3  # to draw and check one, in the interpreter: the mean of all tests that draw, on one core
CONTEXTS = {"github", "matrix", "inputs", "secrets", "needs", "env", "runner"}


def problems(text):
    """What is wrong with a workflow, as lines; none if nothing is."""
    document = yaml.safe_load(text)
    document["on"] = document.pop(True, document.get("on"))  # YAML 1.1 reads `on` as true
    found = [f"unknown key {key}" for key in document.keys() - TOP]
    events = document["on"] if isinstance(document["on"], dict) else dict.fromkeys(document["on"] or [])
    found += [f"unknown event {event}" for event in events.keys() - EVENTS] + ["no event"] * (not events)
    for name, spec in ((events.get("workflow_dispatch") or {}).get("inputs") or {}).items():
        found += [f"input {name}: unknown key {key}" for key in spec.keys() - INPUT]
        kind = {"boolean": bool, "string": str, "number": int, "choice": str}.get(spec.get("type"))
        if kind is None or not isinstance(spec.get("default", kind()), kind):
            found.append(f"input {name}: expected a known type and a default of it")
    jobs = document.get("jobs") or {}
    for name, job in jobs.items():
        found += [f"{name}: unknown key {key}" for key in job.keys() - JOB]
        found += [f"{name}: no {key}" for key in ("runs-on", "timeout-minutes", "steps") if not job.get(key)]
        needs = job.get("needs", [])
        found += [f"{name}: needs {n}" for n in ([needs] if isinstance(needs, str) else needs) if n not in jobs]
        for i, step in enumerate(job.get("steps") or []):
            where = f"{name}, step {i}"
            found += [f"{where}: unknown key {key}" for key in step.keys() - STEP]
            if ("uses" in step) == ("run" in step):
                found.append(f"{where}: expected one of uses and run")
            if "uses" in step and not re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|[0-9a-f]{40})", step["uses"]):
                found.append(f"{where}: expected owner/action@version, got {step['uses']}")
            if "with" in step and "uses" not in step:
                found.append(f"{where}: with belongs to uses")
    for expression in re.findall(r"\$\{\{(.*?)\}\}", text):
        if not re.fullmatch(r" (" + "|".join(CONTEXTS) + r")(\.[\w-]+)+ ", expression):
            found.append(f"expression ${{{{{expression}}}}}")
    if text.count("${{") != text.count("}}"):
        found.append("an expression is not closed")
    return found


def runs(text):
    return [step["run"] for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"] if "run" in step]


def syntax_error(script):
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_has_the_shape_github_accepts(name):
    assert problems(WORKFLOWS[name].read_text()) == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_runs_scripts_that_exist(name):
    for run in runs(WORKFLOWS[name].read_text()):
        assert "${{" not in run, "untrusted text must not become part of a script: pass it in env"
        assert syntax_error(run) == ""
        for script in re.findall(r"\.ci/\w+", run):
            assert os.access(ROOT / script, os.X_OK), f"expected {script} to be executable"
            assert syntax_error((ROOT / script).read_text()) == ""


def test_both_lanes_have_a_workflow():
    assert set(WORKFLOWS) == {"ci", "gpu", "nightly"}
    ci, gpu = (yaml.safe_load(WORKFLOWS[name].read_text()) for name in ("ci", "gpu"))
    assert {"push", "pull_request"} <= ci[True].keys()
    assert ".ci/run" in runs(WORKFLOWS["ci"].read_text())
    assert set(gpu[True]) == {"workflow_dispatch"}
    assert gpu["jobs"]["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    steps = {step.get("uses", "").partition("@")[0]: step for job in gpu["jobs"].values() for step in job["steps"]}
    up, down = (steps[f"actions/{way}-artifact"] for way in ("upload", "download"))
    assert up["if"] == "always()"  # a red gate needs its report most
    assert up["with"]["name"] == down["with"]["name"]
    assert f".ci/gpu {up['with']['path']}" in runs(WORKFLOWS["gpu"].read_text())
    assert gpu["jobs"]["propose"]["permissions"] == {"contents": "write", "pull-requests": "write"}
    [propose] = [run for run in runs(WORKFLOWS["gpu"].read_text()) if "gh pr create" in run]
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
    assert runs(WORKFLOWS["ci"].read_text())[0] == ".ci/run"


def test_a_pull_request_is_gated_against_its_base():
    """On the runner itself: no stored baseline fits it. The base commit has to be in the clone."""
    ci = yaml.safe_load(WORKFLOWS["ci"].read_text())
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
        '-m "parity or edge or suite"',
        "-m edge -k another_gpu",
        "nsa.testing.sanitize",
        "--benchmark-compare",
        "--nsa-update-thresholds",
        "--nsa-update-schedules",
        "nsa/configs/gpus",
        "--nsa-report",
        "--junitxml",
    ):
        assert words in script


MEASURED = "--nsa-update-thresholds --nsa-update-schedules"  # of the report, only where it is written


def selected(command, run_pytest):
    """The test files that a command line of `.ci/gpu` selects."""
    command = command.replace('"$PYTHON" -m pytest', "").replace('"${measured[@]}"', MEASURED)
    words = shlex.split(command.partition("||")[0])
    words = [word for word in words if not word.startswith(("--junitxml", "--benchmark-json", "--nsa-report", "$out"))]
    if "-n" in words:  # a worker process would only import torch once more
        del words[words.index("-n") : words.index("-n") + 2]
    done = run_pytest(*words, "--collect-only", "-q", cwd=ROOT)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def pytest_commands():
    """The command lines of `.ci/gpu` that start pytest, each on one line."""
    text = (ROOT / ".ci" / "gpu").read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith('"$PYTHON" -m pytest')]


def test_the_gpu_script_gates_core_and_training(pytest_commands, run_pytest):
    """Which files run is what pytest collects for the script's own words: a path in the wrong place selects others."""
    everything = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    parity, _, core, training = pytest_commands
    assert selected(parity, run_pytest) == {path for path in everything if not path.startswith("tests/perf/")}
    left_out = {f"tests/perf/test_{name}.py" for name in ("training", "shape", "sweep")}
    assert selected(core, run_pytest) == {path for path in everything if path.startswith("tests/perf/")} - left_out
    assert selected(training, run_pytest) == {"tests/perf/test_training.py"}
    for command in (core, training):
        assert {"--benchmark-compare", "--nsa-strict"} <= set(shlex.split(command))


def test_every_triton_that_must_work_compiles_the_kernels_every_night():
    nightly = yaml.safe_load(WORKFLOWS["nightly"].read_text())
    assert len(nightly[True]["schedule"]) == 1
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly[True]["schedule"][0]["cron"])
    job = nightly["jobs"]["aot"]
    assert job["strategy"].keys() == {"fail-fast", "matrix"}
    assert job["strategy"]["fail-fast"] is False
    *pinned, last = job["strategy"]["matrix"]["triton"]
    assert last == "newest"
    passed = {entry["triton"] for entry in yaml.safe_load(budgets.PASSED.read_text())["passed"]}
    assert [".".join(map(str, matrix.minor(version))) for version in pinned] == sorted(passed, key=matrix.minor)
    (step,) = (step for step in job["steps"] if "run" in step)
    assert step["run"] == '.ci/aot "$TRITON"'
    assert step["env"]["TRITON"] == "${{ matrix.triton }}"
    assert step["env"]["PIP_EXTRA_INDEX_URL"].endswith("/cpu")  # a build of torch for CUDA pins its own Triton
    script = (ROOT / ".ci" / "aot").read_text()
    for words in ("-m venv", "-c constraints.txt", "triton==$version", "-m pytest -m aot"):
        assert words in script


def test_calls_are_drawn_at_length_every_night(run_pytest):
    """All tests that draw, and within the hour on two cores if a call takes what it took when this was written."""
    job = yaml.safe_load(WORKFLOWS["nightly"].read_text())["jobs"]["drawn"]
    make, command = (step["run"] for step in job["steps"] if "run" in step)
    assert make == "make --no-print-directory .venv/ready"
    python, *arguments = shlex.split(command)
    assert (python, arguments[:2]) == (".venv/bin/python", ["-m", "pytest"])
    assert arguments[arguments.index("--hypothesis-profile") + 1] == "deep"
    assert profiles.EXAMPLES["deep"] >= 10 * profiles.EXAMPLES[profiles.DEFAULT]
    done = run_pytest(*arguments[2:], "-n", "0", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=ROOT)
    chosen = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    drawn = {
        f"{path.relative_to(ROOT)}::{test.name}"
        for path in ROOT.glob("tests/**/test_*.py")
        for test in ast.parse(path.read_text()).body
        if isinstance(test, ast.FunctionDef) and any("given(" in ast.unparse(x) for x in test.decorator_list)
    }
    assert chosen == drawn
    assert len(drawn) * profiles.EXAMPLES["deep"] * SECONDS_A_CALL / 2 < 0.8 * 60 * job["timeout-minutes"]


def test_nightly_script_asks_for_a_version():
    done = subprocess.run([ROOT / ".ci" / "aot"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "expected a version of Triton, or newest" in done.stderr


BROKEN = {
    "misspelt-key": ("timeout-minutes", "timeout_minutes", "unknown key timeout_minutes"),
    "unpinned": ("actions/checkout@v4", "actions/checkout", "expected owner/action@version"),
    "nothing-to-do": ("- run: .ci/run", "- name: nothing", "expected one of uses and run"),
    "unclosed": ("matrix.python }}", "matrix.python", "an expression is not closed"),
    "unknown-context": ("matrix.python", "matrx.python", "expression"),
    "unknown-event": ("pull_request", "pullrequest", "unknown event pullrequest"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_workflow_is_noticed(how):
    right, wrong, message = BROKEN[how]
    text = WORKFLOWS["ci"].read_text()
    assert right in text
    assert any(message in problem for problem in problems(text.replace(right, wrong)))
