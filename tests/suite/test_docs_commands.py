"""Commands in documents parse: options are registered, paths, targets, sub-commands and cases exist."""

import ast
import functools
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from nsa import __main__ as command_line
from nsa.testing import shapes
from nsa.testing.contestants import named
from nsa.testing.matrix import case

from .documents import DOCUMENTS, ROOT, fenced, inline


def commands(path):
    """Commands in shell blocks and backticks, without comments and settings of the environment before them."""
    lines = [line for language, _, text in fenced(path) if language in ("", "sh", "bash") for line in text.splitlines()]
    for line in [*lines, *inline(path.read_text(encoding="utf-8"))]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe: prose, or a pattern
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and "…" not in line:
            yield words


def problems(words, config):
    """What of a command does not exist, as lines; none if all does, or it is nobody's command here."""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return [f"no make target {word}" for word in rest if "=" not in word and word not in targets]
    if program.startswith(".ci/"):
        return [] if os.access(ROOT / program, os.X_OK) else [f"{program} is no script"]
    if Path(program).name in ("python", "python3") and rest:
        if rest[0] != "-m":
            return [] if rest[0].startswith("-") or (ROOT / rest[0]).is_file() else [f"no file {rest[0]}"]
        if rest[1] != "pytest":
            return of_module(rest[1], rest[2:])
        program, rest = "pytest", rest[2:]
    return of_pytest(rest, config) if program == "pytest" else []


def of_module(module, arguments):
    if module == "nsa":
        try:
            command_line.main([*arguments, "--help"])
        except SystemExit as end:
            return [] if end.code == 0 else [f"python -m nsa does not take {arguments}"]
    if importlib.util.find_spec(module) is None:
        return [f"no module {module}"]
    if not module.startswith("nsa."):
        return []
    path = Path(importlib.util.find_spec(module).origin)
    sources = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    source = "".join(file.read_text() for file in sources)
    return [f"{module} has no {word}" for word in arguments if word.startswith("-") and f'"{word}"' not in source]


def of_pytest(arguments, config):
    try:
        parsed, unknown = config._parser.parse_known_and_unknown_args(arguments)
    except pytest.UsageError as error:
        return [str(error)]
    found = [f"no option {word}" for word in unknown]
    for path in map(str, parsed.file_or_dir):
        if parsed.pyargs:
            found += [] if importlib.util.find_spec(path) else [f"no package {path}"]
            continue
        file, _, function = path.partition("::")
        if not (ROOT / file).exists():
            found.append(f"no path {file}")
        elif function and f"def {function.partition('[')[0]}(" not in (ROOT / file).read_text():
            found.append(f"no test {path}")
    words = set(re.findall(r"[\w.-]+", parsed.keyword or "")) - {"and", "or", "not"}
    found += [
        f"nothing is called {word}" for word in sorted(words) if not any(word in text for text in searched_by_k())
    ]
    for impl in parsed.nsa_impl:
        try:
            None if impl.startswith("package.") else named.load(impl)
        except ValueError as error:
            found.append(str(error))
    marks = {line.partition(":")[0].partition("(")[0] for line in config.getini("markers")}
    words = set(re.findall(r"\w+", parsed.markexpr or "")) - {"and", "or", "not"}
    found += [f"no mark {word}" for word in sorted(words - marks)]
    for shape in parsed.nsa_shape or []:
        try:
            shapes.parse_shape(shape)
        except ValueError as error:
            found += [str(error)] if "=" in shape else []  # else a placeholder
    return found


@functools.cache
def searched_by_k():
    """What `-k` may look for: the tests' sources, and the cases' ids."""
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("tests", "nsa/testing/suite")
        for path in (ROOT / folder).rglob("test_*.py")
        if path != Path(__file__)
    ]
    return [*sources, *(case.id for case in (*case.parity(), *case.small(), *case.core()))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_exist(name, pytestconfig, capsys):
    listed = list(commands(DOCUMENTS[name]))
    if DOCUMENTS[name].parent.name != "notebook":  # its pages are measurements
        assert any(words[0] in ("pytest", "make") for words in listed)
    assert [f"{shlex.join(words)}: {what}" for words in listed for what in problems(words, pytestconfig)] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_that_are_mentioned_exist(name, pytestconfig):
    """In tables and in prose, too."""
    parser = pytestconfig._parser
    registered = {word for group in (*parser._groups, parser._anonymous) for o in group.options for word in o.names()}
    mentioned = set(re.findall(r"--(?:nsa|benchmark)-[a-z][a-z-]*[a-z]", DOCUMENTS[name].read_text(encoding="utf-8")))
    assert mentioned - registered == set()


def test_words_of_when_something_is_off_are_printed():
    """The first column of its tables, as strings of the library and its suite."""
    page = DOCUMENTS["when-something-is-off.md"].read_text()
    words = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    sources = [ast.parse(path.read_text()) for path in (ROOT / "nsa").rglob("*.py")]
    constants = [x.value for tree in sources for x in ast.walk(tree) if isinstance(x, ast.Constant)]
    strings = [value for value in constants if isinstance(value, str)]
    assert len(words) >= 15
    assert [word for word in words if not any(word in text for text in strings)] == []
    assert len(page.splitlines()) <= 60


BROKEN = {
    "option": ("pytest -m perf --nsa-rapport=out", "no option --nsa-rapport"),
    "value": ("pytest -m perf --nsa-iters", "expected one argument"),
    "path": ("pytest tests/perf/test_nothing.py", "no path tests/perf/test_nothing.py"),
    "test": ("pytest tests/parity/test_spans.py::test_nothing", "no test tests/parity/test_spans.py::test_nothing"),
    "mark": ("pytest -m 'perf and fast'", "no mark fast"),
    "keyword": ("pytest -m parity -k 'mixed and triton_sel_party'", "nothing is called triton_sel_party"),
    "impl": (
        "pytest -m parity --nsa-impl examples.your_kernel:attends",
        "has no attribute 'attends'",
    ),
    "shape": ("pytest -m perf --nsa-shape N=64,Q=8", "--nsa-shape"),
    "as-a-module": (".venv/bin/python -m pytest --nsa-rapport", "no option --nsa-rapport"),
    "target": ("make tests WORKERS=2", "no make target tests"),
    "sub-command": ("python -m nsa calibrated", "python -m nsa does not take ['calibrated']"),
    "module": ("python -m nsa.testing.rapport -o out", "no module nsa.testing.rapport"),
    "module-option": ("python -m nsa.testing.report --out out", "nsa.testing.report has no --out"),
    "file": ("python examples/paged.py", "no file examples/paged.py"),
    "script": (".ci/gpus out", ".ci/gpus is no script"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_command_is_noticed(how, pytestconfig, tmp_path, capsys):
    document = tmp_path / "broken.md"
    document.write_text(f"```sh\nNSA=1 {BROKEN[how][0]}  # 'comment\n```\n")
    (words,) = commands(document)
    (problem,) = problems(words, pytestconfig)
    assert BROKEN[how][1] in problem
