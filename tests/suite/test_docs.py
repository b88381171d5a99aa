"""Documents cannot rot: their Python runs, their tables and figures are the code's, their links lead somewhere.

Their commands are in `test_docs_commands.py`.
"""

import argparse
import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import nsa
from nsa import gpu, settings, validate
from nsa.testing.clock import guard
from nsa.testing.gate import rule, store
from nsa.testing.judge import forward
from nsa.testing.report import pages, tables

from .documents import DOCUMENTS, PROVING, REPORT, ROOT, USING, fenced, inline, names, prose, table

# --- Python ----------------------------------------------------------------------------------------------------------

# README's reader has a GPU. Without one its example runs on the CPU, where 1,024 queries take 20 seconds; 64 do.
WITHOUT_GPU = {
    "README.md": [
        ('device="cuda"', 'device="cpu"'), ("(1, 1024, 64, ", "(1, 64, 64, "), ("(1, 1024, 4, 8)", "(1, 64, 4, 8)"),
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, path in DOCUMENTS.items() if any(b[0] == "python" for b in fenced(path))]
)
def test_every_python_block_runs(name, lane, monkeypatch, fresh_routes, tmp_path):
    """In order, as one program: a block may use what blocks above it made."""
    compiler = torch.compile
    # Traced and differentiated as by any backend; the code that inductor generates is no document's business.
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, **how, backend="aot_eager"))
    namespace = {"__name__": "document"}
    changes = WITHOUT_GPU.get(name, []) if lane != "gpu" else []
    code = [(line, text) for language, line, text in fenced(DOCUMENTS[name]) if language == "python"]
    for before, _ in changes:
        assert any(before in text for _, text in code), f"expected {before} in {name}"
    # In a file of its own, on the lines where it stands in the document: torch.compile reads the file, and prose is no
    # Python.
    lines = [""] * (code[-1][0] + code[-1][1].count("\n") + 1)
    for line, text in code:
        lines[line : line + text.count("\n")] = text.splitlines()
    path = tmp_path / f"{name}.py"
    path.write_text("\n".join(lines))
    # The CPU lane is Triton's interpreter, which would take minutes; users without a GPU have packed SDPA.
    with torch.random.fork_rng(), nsa.configure(use_triton_sel=lane == "gpu"):
        torch.manual_seed(0)
        for line, text in code:
            for before, after in changes:
                text = text.replace(before, after)
            exec(compile("\n" * line + text, str(path), "exec"), namespace)
    if any("torch.compile(" in text for _, text in code):
        torch.compiler.reset()
    calls = any(f"nsa.{name}(" in text for _, text in code for name in ("selection_attention", "sel_attn_fwd_dense"))
    assert bool(nsa.routes()) >= calls, "expected the blocks to call the library"


def test_a_block_that_fails_is_named_by_its_line(tmp_path, lane, monkeypatch, fresh_routes):
    document = tmp_path / "broken.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    monkeypatch.setitem(DOCUMENTS, "broken.md", document)
    with pytest.raises(AssertionError) as error:
        test_every_python_block_runs("broken.md", lane, monkeypatch, fresh_routes, tmp_path)
    assert (error.traceback[-1].path.name, error.traceback[-1].lineno + 1) == ("broken.md.py", 8)


# --- tables ----------------------------------------------------------------------------------------------------------

OF_OTHERS = re.compile(r"(TRITON|XDG|CUDA|PYTEST)_[A-Z_]+")
INTERNAL = {
    "NSA_TRACES": "tests/edge/kernels/test_ahead.py tells its own child where to write",
    "TRITON_CACHE_DIR": "set, not read: the compile matrix gives its children an empty cache",
    "PYTEST_XDIST_WORKER": "xdist sets it, and nobody else",
}


def variables():
    """Every variable of the environment that the package, its suite or its scripts read."""
    python = [ROOT / "conftest.py", *(ROOT / "nsa").rglob("*.py")]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    scripts = [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir()]
    found = {f"NSA_{name.upper()}" for name in settings.NAMES}
    for path in (*python, *tests, *scripts):
        found |= set(re.findall(r"\bNSA_[A-Z]\w*", path.read_text(encoding="utf-8")))
    for path in python:
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        found |= {value for value in constants if isinstance(value, str) and OF_OTHERS.fullmatch(value)}
    return found


def test_variables_are_those_that_the_code_reads():
    rows = table(USING, "variable", "setting", "default", "what it does")
    read = variables()
    assert names(row[0] for row in rows) == read - INTERNAL.keys()
    assert INTERNAL.keys() <= read, "expected what is called internal to be there"


def test_settings_and_their_defaults():
    rows = [row for row in table(USING, "variable", "setting", "default", "what it does") if row[1] != "-"]
    plain = settings.Settings()
    shown = {None: "per GPU", True: "true", False: "false"}
    want = [(name, shown.get(value := getattr(plain, name), value)) for name in settings.NAMES]
    assert sorted((row[1].strip("`"), row[2]) for row in rows) == sorted(want)
    assert all(row[0] == f"`NSA_{row[1].strip('`').upper()}`" for row in rows)


def test_options_are_those_that_the_suite_registers(pytestconfig):
    (group,) = (group for group in pytestconfig._parser._groups if group.name == "nsa")
    registered = {option.names()[0]: option.attrs() for option in group.options}
    public = {name for name, attributes in registered.items() if attributes["help"] is not argparse.SUPPRESS}
    rows = table(REPORT, "option", "what it does")
    assert names(row[0] for row in rows) == public
    for option, text in rows:
        attributes = registered[option.strip("`")]
        if attributes.get("type") is int:
            assert text.endswith(f", {attributes['default']}")


def test_backends_and_schedules():
    assert names(row[0] for row in table(USING, "`backend=`", "what runs")) == set(validate.BACKENDS)
    assert names(row[0] for row in table(USING, "`schedule=`", "of the Triton kernels")) == set(validate.SCHEDULES)


def test_columns_are_those_of_the_report():
    page, csv = (part.strip() for part in REPORT.read_text().split("Columns of `report.csv`"))
    headers = (
        tables.SUMMARY_HEADER,
        tables.PREFILL_HEADER,
        tables.TRAINING_HEADER,
        tables.CASE_HEADER,
        tables.SERVING_HEADER,
    )
    change = ("benchmark", "group", "change, to control", "before", "after")
    for text, wanted in (
        (page, {name for header in (*headers, change) for name in header}),
        (csv, set(pages.COLUMNS)),
    ):
        rows = text.partition("| column | meaning |\n| --- | --- |\n")[2].split("\n\n")[0].splitlines()
        assert names(row.split(" | ")[0] for row in rows) == wanted


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_code():
    """Where a document quotes a number, it is what the code has."""
    low, high = validate.HEAD_DIMS
    bound = "`err <= 2 * err_SDPA + 4 * eps(dtype) * max|ref|`"
    three = {3: "three"}[store.FILES]
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


def test_memory_of_training_is_what_is_measured():
    """`nsa.testing.clock.training` counts outputs and gradients; the report and the list of its columns say so."""
    said = "beside its inputs (outputs and gradients included)"
    assert said in tables.TRAINING_TEXT
    assert f"| `memory vs flash` | memory of a step {said}, over " in REPORT.read_text(encoding="utf-8")


def test_the_bound_is_the_one_quoted():
    class Half:
        q = torch.empty(0, dtype=torch.float16)

    oracle = forward.Oracle(Half, *[None] * 3, err_sdpa=0.5, peak=3.0, lse_atol=0.0, seen=Half)
    assert oracle.bound == 2 * 0.5 + 4 * torch.finfo(torch.float16).eps * 3.0


# --- links and names -------------------------------------------------------------------------------------------------


def anchors(text):
    """Those that GitHub makes of headings."""
    found = Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield slug if not found[slug] else f"{slug}-{found[slug]}"
        found[slug] += 1


def dead(path):
    """Relative links of a document that lead nowhere."""
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", prose(text))):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_somewhere(name):
    assert list(dead(DOCUMENTS[name])) == []


def test_dead_links_are_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# One, `two`!\n## One two\n\n```\n# not a heading\n```\n")
    good = "[a](there.md) [b](there.md#one-two) [c](there.md#one-two-1) [d](https://x.y/z) [e](#here) `[f](code)`"
    document = tmp_path / "a.md"
    document.write_text(f"# Here\n{good}\n[g](gone.md) [h](there.md#three) [i](#there) [j](there.md#not-a-heading)\n")
    assert [problem.partition(":")[0] for problem in dead(document)] == [
        "gone.md", "there.md#three", "#there", "there.md#not-a-heading",
    ]  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_names_that_are_mentioned_exist(name):
    """Paths from the root, and what `nsa` is said to have."""
    codes = inline(DOCUMENTS[name].read_text(encoding="utf-8"))
    paths = [code for code in codes if re.fullmatch(r"(nsa|tests|docs|examples|\.ci|\.github)/[\w./-]+", code)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    public = {found for code in codes for found in re.findall(r"(?<![\w./-])nsa\.(\w+)", code)}
    known = {found for found in public if hasattr(nsa, found) or importlib.util.find_spec(f"nsa.{found}")}
    assert public - known == set()
