"""Documents cannot rot: Python runs, commands parse, tables and figures are the code's, links lead somewhere."""

import argparse
import ast
import functools
import importlib.util
import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

import nsa
from nsa import __main__ as command_line
from nsa import gpu, settings, validate
from nsa.testing import shapes
from nsa.testing.clock import guard
from nsa.testing.contestants import named
from nsa.testing.gate import rule, store
from nsa.testing.judge import forward
from nsa.testing.matrix import cases
from nsa.testing.report import tables

ROOT = Path(__file__).parents[2]
USING, PROVING, REPORT = (ROOT / "docs" / f"{name}.md" for name in ("using", "proving", "report"))
DOCUMENTS = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
every_document = pytest.mark.parametrize("name", DOCUMENTS)


def fenced(path):
    """`[(language, first line, text)]` of the fenced blocks of a document."""
    text = path.read_text(encoding="utf-8")
    return [(m[1], text.count("\n", 0, m.start()) + 1, m[2]) for m in FENCE.finditer(text)]


def inline(path):
    """What stands in backticks outside fenced blocks, each on one line."""
    return [
        " ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", path.read_text(encoding="utf-8")))
    ]


# --- Python ----------------------------------------------------------------------------------------------------------

# README's reader has a GPU. Without one its example runs on the CPU, where 1,024 queries take 20 seconds; 16 do.
WITHOUT_GPU = {'device="cuda"': 'device="cpu"', "(1, 1024, 64, ": "(1, 16, 64, ", "(1, 1024, 4, 8)": "(1, 16, 4, 8)"}


@pytest.mark.parametrize("name", [name for name, path in DOCUMENTS.items() if "python" in [b[0] for b in fenced(path)]])
def test_every_python_block_runs(name, lane, monkeypatch, fresh_routes, tmp_path):
    """In order, as one program: a block may use what blocks above it made."""
    compiler = torch.compile
    # Traced and differentiated as by any backend; the code that inductor generates is no document's business.
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, **how, backend="aot_eager"))
    # In a file of its own, on the lines where it stands in the document: torch.compile reads the file.
    lines = [""] * (DOCUMENTS[name].read_text(encoding="utf-8").count("\n") + 1)
    for language, line, text in fenced(DOCUMENTS[name]):
        if language == "python":
            lines[line : line + text.count("\n")] = text.splitlines()
    program = "\n".join(lines)
    for before, after in WITHOUT_GPU.items() if name == "README.md" and lane != "gpu" else ():
        assert before in program, f"expected {before} in {name}"
        program = program.replace(before, after)
    path = tmp_path / f"{name}.py"
    path.write_text(program)
    # The CPU lane is Triton's interpreter, which would take minutes; users without a GPU have packed SDPA.
    with torch.random.fork_rng(), nsa.configure(use_triton_sel=lane == "gpu"):
        torch.manual_seed(0)
        exec(compile(program, str(path), "exec"), {"__name__": "document"})
    if "torch.compile(" in program:
        torch.compiler.reset()
    calls = any(f"nsa.{name}(" in program for name in ("selection_attention", "sel_attn_fwd_dense"))
    assert bool(nsa.routes()) >= calls, "expected the blocks to call the library"


def test_a_block_that_fails_is_named_by_its_line(tmp_path, lane, monkeypatch, fresh_routes):
    document = tmp_path / "broken.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    monkeypatch.setitem(DOCUMENTS, "broken.md", document)
    with pytest.raises(AssertionError) as error:
        test_every_python_block_runs("broken.md", lane, monkeypatch, fresh_routes, tmp_path)
    assert (error.traceback[-1].path.name, error.traceback[-1].lineno + 1) == ("broken.md.py", 8)


# --- tables and figures ----------------------------------------------------------------------------------------------

OF_OTHERS = re.compile(r"(TRITON|XDG|CUDA|PYTEST)_[A-Z_]+")
# For our own children and by xdist, not for users.
INTERNAL = {"NSA_TRACES", "NSA_RECORD_WORKLOAD", "TRITON_CACHE_DIR", "PYTEST_XDIST_WORKER"}
SETTINGS = "variable", "setting", "default", "what it does"


def rows(path, *header):
    """The rows of the one table with this header, `[[cell]]`."""
    text = path.read_text(encoding="utf-8")
    head = f"| {' | '.join(header)} |\n|{' --- |' * len(header)}\n"
    assert text.count(head) == 1, f"{path.name}: expected one table {head}"
    lines = text.partition(head)[2].split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cells):
    """What a column holds in backticks, each once."""
    found = Counter(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    assert max(found.values()) == 1, found
    return set(found)


@functools.cache
def strings():
    """The constant strings of the package, of its entry points and of `conftest.py`."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "conftest.py", *(ROOT / "nsa").rglob("*.py"))
    ]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def test_settings_are_those_that_the_code_reads():
    """Every variable that the package, its suite or its scripts read, and the defaults of settings."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    scripts = [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir()]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "conftest.py", *(ROOT / "nsa").rglob("*.py"), *tests)]
    texts += [path.read_text(encoding="utf-8") for path in scripts]
    read = {f"NSA_{name.upper()}" for name in settings.NAMES} | {v for v in strings() if OF_OTHERS.fullmatch(v)}
    read |= {name for text in texts for name in re.findall(r"\bNSA_[A-Z]\w*", text)}
    table = rows(USING, *SETTINGS)
    assert names(row[0] for row in table) == read - INTERNAL
    assert read >= INTERNAL, "expected what is called internal to be there"
    shown = {None: "per GPU", True: "true", False: "false"}
    defaults = {name: getattr(settings.Settings(), name) for name in settings.NAMES}
    want = {f"`NSA_{name.upper()}`": (f"`{name}`", shown.get(value, value)) for name, value in defaults.items()}
    assert {row[0]: (row[1], row[2]) for row in table if row[1] != "-"} == want


def test_options_are_those_that_the_suite_registers(pytestconfig):
    (group,) = (group for group in pytestconfig._parser._groups if group.name == "nsa")
    registered = {option.names()[0]: option.attrs() for option in group.options}
    table = rows(REPORT, "option", "what it does")
    public = {name for name, attributes in registered.items() if attributes["help"] is not argparse.SUPPRESS}
    assert names(row[0] for row in table) == public
    numbers = {row[0].strip("`"): row[1] for row in table if registered[row[0].strip("`")].get("type") is int}
    assert [name for name, text in numbers.items() if not text.endswith(f", {registered[name]['default']}")] == []


def test_choices_and_columns():
    assert names(row[0] for row in rows(USING, "`backend=`", "what runs")) == set(validate.BACKENDS)
    assert names(row[0] for row in rows(USING, "`schedule=`", "of the Triton kernels")) == set(validate.SCHEDULES)
    assert names(row[0] for row in rows(REPORT, "column", "meaning")) == set(tables.CSV)


def test_figures_are_those_of_the_code():
    """Where a document quotes a number, it is what the code has."""
    (low, high), three = validate.HEAD_DIMS, {3: "three"}[store.FILES]
    bound = "`err <= 2 * err_SDPA + 4 * eps(dtype) * max|ref|`"
    said = {
        USING: [
            f"`G` from 1 to {validate.MAX_GROUP}, `D` and `Dv` from {low} to {high}", bound,
            f"mean absolute error of at most {forward.MAE:g} for N(0, 1) inputs and rows of {forward.MAE_MIN_L} keys",
            f"On a GPU without a measured threshold it is {gpu.DEFAULT_MIN_L} keys",
        ],
        PROVING: [
            bound, f"mean absolute error of at most {forward.MAE:g},", f"A baseline is {three} files",
            f"| pass | at most {rule.LIMIT:.0%} worse,", f"| FAIL | more than {rule.LIMIT:.0%} worse in two",
            f"| AMBIGUOUS | more than {rule.LIMIT:.0%} worse in two", f"the spread is above {rule.LIMIT / 2:.0%}",
            f"by more than {guard.SLACK - 1:.0%} is an invalid measurement",
        ],
    }  # fmt: skip
    for path, sentences in said.items():
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in text] == []


def test_the_gpus_that_were_measured_are_named():
    names = sorted(gpu.read(file).threshold.provenance["gpu"] for file in gpu.PACKAGED.glob("*.yaml"))
    for page in (ROOT / "README.md", USING):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"ships for: {', '.join(names)}. On" in text
        assert f"{gpu.DEFAULT_MIN_L} keys" in text.partition("ships for: ")[2][:200]


def test_words_of_when_something_is_off_are_printed():
    """The first column of its tables, as strings of the library and its suite."""
    page = DOCUMENTS["when-something-is-off.md"].read_text()
    words = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(words) >= 15
    assert [word for word in words if not any(word in text for text in strings())] == []
    assert len(page.splitlines()) <= 60


# --- links and names -------------------------------------------------------------------------------------------------


def anchors(text):
    """Those that GitHub makes of headings."""
    found = Counter()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield slug if not found[slug] else f"{slug}-{found[slug]}"
        found[slug] += 1


def dead(path):
    """Relative links of a document that lead nowhere."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", re.sub(r"`[^`]+`", "", text)):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield link


@every_document
def test_links_lead_somewhere_and_names_exist(name):
    """Relative links, paths from the root, and what `nsa` is said to have."""
    assert list(dead(DOCUMENTS[name])) == []
    codes = inline(DOCUMENTS[name])
    paths = [code for code in codes if re.fullmatch(r"(nsa|tests|docs|examples|\.ci|\.github)/[\w./-]+", code)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    public = {found for code in codes for found in re.findall(r"(?<![\w./-])nsa\.(\w+)", code)}
    assert {x for x in public if not hasattr(nsa, x) and not importlib.util.find_spec(f"nsa.{x}")} == set()


def test_dead_links_are_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# One, `two`!\n## One two\n\n```\n# not a heading\n```\n")
    good = "[a](there.md) [b](there.md#one-two) [c](there.md#one-two-1) [d](https://x.y/z) [e](#here) `[f](code)`"
    bad = ["gone.md", "there.md#three", "#there", "there.md#not-a-heading"]
    document = tmp_path / "a.md"
    document.write_text(f"# Here\n{good}\n{' '.join(f'[x]({link})' for link in bad)}\n")
    assert list(dead(document)) == bad


# --- commands --------------------------------------------------------------------------------------------------------


def commands(path):
    """Commands in shell blocks and backticks, without comments and settings of the environment before them."""
    lines = [line for language, _, text in fenced(path) if language in ("", "sh", "bash") for line in text.splitlines()]
    for line in [*lines, *inline(path)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe: prose, or a pattern
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and "…" not in line:
            yield words


def problems(words, config):
    """What of a command does not exist, as lines; none if all does, or if the command is not ours."""
    program, rest = words[0], words[1:]
    if Path(program).name in ("python", "python3") and rest[:2] == ["-m", "pytest"]:
        program, rest = "pytest", rest[2:]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        yield from (f"no make target {word}" for word in rest if "=" not in word and word not in targets)
    elif program.startswith(".ci/") and not os.access(ROOT / program, os.X_OK):
        yield f"{program} is no script"
    elif program == "pytest":
        yield from of_pytest(rest, config)
    elif Path(program).name in ("python", "python3") and rest[:1] == ["-m"]:
        yield from of_module(rest[1], rest[2:])
    elif Path(program).name in ("python", "python3") and rest and not rest[0].startswith("-"):
        yield from [] if (ROOT / rest[0]).is_file() else [f"no file {rest[0]}"]


def of_module(module, arguments):
    found = importlib.util.find_spec(module)
    if module == "nsa":
        try:
            command_line.main([*arguments, "--help"])
        except SystemExit as end:
            yield from [] if end.code == 0 else [f"python -m nsa does not take {arguments}"]
    elif found is None:
        yield f"no module {module}"
    elif module.startswith("nsa."):
        path = Path(found.origin)
        files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
        source = "".join(file.read_text() for file in files)
        yield from (f"{module} has no {word}" for word in arguments if word[:1] == "-" and f'"{word}"' not in source)


def of_pytest(arguments, config):
    try:
        parsed, unknown = config._parser.parse_known_and_unknown_args(arguments)
    except pytest.UsageError as error:
        yield str(error)
        return
    yield from (f"no option {word}" for word in unknown)
    for path in map(str, parsed.file_or_dir):
        file, _, function = path.partition("::")
        if not (importlib.util.find_spec(path) if parsed.pyargs else (ROOT / file).exists()):
            yield f"no path {file}"
        elif function and f"def {function.partition('[')[0]}(" not in (ROOT / file).read_text():
            yield f"no test {path}"
    logic = {"and", "or", "not"}
    words = set(re.findall(r"[\w.-]+", parsed.keyword or "")) - logic
    yield from (f"nothing is called {word}" for word in words if not any(word in text for text in searched_by_k()))
    marks = {line.partition(":")[0].partition("(")[0] for line in config.getini("markers")} | logic
    yield from (f"no mark {word}" for word in re.findall(r"\w+", parsed.markexpr or "") if word not in marks)
    checks = [(named.load, impl) for impl in parsed.nsa_impl if not impl.startswith("package.")]
    checks += [(shapes.parse_shape, shape) for shape in parsed.nsa_shape or [] if "=" in shape]  # else a placeholder
    for check, value in checks:
        try:
            check(value)
        except ValueError as error:
            yield str(error)


@functools.cache
def searched_by_k():
    """What `-k` may look for: the tests' sources, and the cases' ids."""
    folders = [ROOT / "tests", ROOT / "nsa" / "testing" / "suite"]
    sources = [path for folder in folders for path in folder.rglob("test_*.py") if path != Path(__file__)]
    ids = [case.id for case in (*cases.parity(), *cases.small(), *cases.core())]
    return [path.read_text(encoding="utf-8") for path in sources] + ids


@every_document
def test_commands_and_options_exist(name, pytestconfig, capsys):
    """In blocks, in tables and in prose."""
    listed = list(commands(DOCUMENTS[name]))
    if DOCUMENTS[name].parent.name not in ("notebook", "results"):  # their pages are measurements
        assert any(words[0] in ("pytest", "make") for words in listed)
    assert [f"{shlex.join(words)}: {what}" for words in listed for what in problems(words, pytestconfig)] == []
    parser = pytestconfig._parser
    registered = {word for group in (*parser._groups, parser._anonymous) for o in group.options for word in o.names()}
    mentioned = set(re.findall(r"--(?:nsa|benchmark)-[a-z][a-z-]*[a-z]", DOCUMENTS[name].read_text(encoding="utf-8")))
    assert mentioned - registered == set()


BROKEN = {
    "pytest -m perf --nsa-rapport=out": "no option --nsa-rapport",
    "pytest -m perf --nsa-iters": "expected one argument",
    "pytest tests/perf/test_nothing.py": "no path tests/perf/test_nothing.py",
    "pytest --pyargs nsa.testing.suites": "no path nsa.testing.suites",
    "pytest tests/parity/test_spans.py::test_nothing": "no test tests/parity/test_spans.py::test_nothing",
    "pytest -m 'perf and fast'": "no mark fast",
    "pytest -m parity -k 'mixed and triton_sel_party'": "nothing is called triton_sel_party",
    "pytest -m parity --nsa-impl examples.your_kernel:attends": "has no attribute 'attends'",
    "pytest -m perf --nsa-shape N=64,Q=8": "--nsa-shape",
    ".venv/bin/python -m pytest --nsa-rapport": "no option --nsa-rapport",
    "make tests WORKERS=2": "no make target tests",
    "python -m nsa calibrated": "python -m nsa does not take ['calibrated']",
    "python -m nsa.testing.rapport -o out": "no module nsa.testing.rapport",
    "python -m nsa.testing.report --out out": "nsa.testing.report has no --out",
    "python examples/paged.py": "no file examples/paged.py",
    ".ci/gpus out": ".ci/gpus is no script",
}


@pytest.mark.parametrize("command", BROKEN)
def test_a_broken_command_is_noticed(command, pytestconfig, tmp_path, capsys):
    document = tmp_path / "broken.md"
    document.write_text(f"```sh\nNSA=1 {command}  # 'comment\n```\n")
    (words,) = commands(document)
    (problem,) = problems(words, pytestconfig)
    assert BROKEN[command] in problem
