"""docs/rtx4090-report.md: every figure in it recomputed, or read again from the file that it comes from."""

import itertools
import math
import re

import pytest
import torch

from docs import rtx4090_report as audit
from nsa import gpu, settings
from nsa.testing.clock.guard import Ceilings, guard
from nsa.testing.clock.timing import InvalidMeasurement, Timing
from nsa.testing.compile import budgets
from nsa.testing.compile.matrix import Compiled
from nsa.testing.compile.points import ARCHITECTURES
from nsa.testing.report import recording

CARD = "NVIDIA GeForce RTX 4090"
STALE = "docs/rtx4090-report.md is out of date: python docs/rtx4090_report.py"
LIMITS = Ceilings(copy=audit.BANDWIDTH, read=audit.BANDWIDTH, matmul=math.inf)
MIB = 1 << 20


@pytest.fixture(scope="module")
def document():
    return audit.DOCUMENT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def errors():
    """The difference that leaving out all but 64 keys makes, by shape and L."""
    return {shape: audit.truncation(shape, audit.ROWS) for shape in audit.PUBLISHED}


# --- the report ------------------------------------------------------------------------------------------------------


def test_published_errors_are_those_of_64_keys(document, errors):
    rows = audit.table(document, "errors")
    assert [int(row["L"]) for row in rows] == [64, 128, 256, 512, 1024]
    for row, shape in itertools.product(rows, audit.PUBLISHED):
        L, columns = int(row["L"]), f"{shape.H}×{shape.D}"
        published, recomputed = (float(row[f"{columns} {what}"]) for what in ("published", "recomputed"))
        assert published == audit.PUBLISHED[shape][L].error
        assert abs(recomputed - errors[shape][L]) < 6e-4, STALE  # three decimals
        if L == 64:
            assert recomputed == 0
            assert published < 2e-4
        else:
            assert recomputed == pytest.approx(published, rel=0.02)
            assert errors[shape][L] == pytest.approx(published, rel=0.02)


def test_truncation_is_attention_over_all_keys_less_that_over_the_first():
    """The arithmetic of the table, against torch's SDPA."""
    shape = audit.Shape(N=4, H=2, D=16)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, n, 16, generator=generator) for n in (2, 1024, 1024))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = {
        L: (attend(q, k[:, :L], v[:, :L]) - attend(q, k[:, :64], v[:, :64])).abs().mean() for L in audit.LENGTHS
    }
    assert audit.truncation(shape, rows=4, seed=3) == pytest.approx(
        {L: float(x) for L, x in expected.items()}, abs=1e-6
    )


def test_one_key_would_differ_at_64_keys_already(document):
    """SDPA's top-left mask for one query shows it the first key, whose value is then the output."""
    found = [audit.truncation(shape, 64, keys=1)[64] for shape in audit.PUBLISHED]
    assert found == pytest.approx([0.80, 0.80], abs=0.02)
    assert "it differs by 0.80 at 64 keys" in document


def test_published_sdpa_times_beat_the_card(document):
    rows = audit.table(document, "bandwidth")
    published = [(line.triton, line.sdpa) for lines in audit.PUBLISHED.values() for line in lines.values()]
    assert [(float(row["Triton, ms"]), float(row["SDPA, ms"])) for row in rows] == published
    refused, rates = set(), []
    for row in rows:
        N, H, D, L = map(int, re.findall(r"\d+", row["shape"] + " " + row["L"]))
        assert (H, D) in {(4, 64), (8, 128)}
        nbytes, seconds = N * L * D * 2 * 2, float(row["SDPA, ms"]) / 1e3
        assert row["K and V"] == f"{nbytes // MIB} MiB"
        assert row["GB/s read by SDPA"] == f"{nbytes / seconds / 1e9:,.0f}"
        assert row["of the card's"] == f"{nbytes / seconds / 1008e9:.2f}×"
        rates.append(nbytes / seconds / 1008e9)
        try:
            guard("SDPA", Timing([seconds], "eager", cold=True, sets=1, calls=1), nbytes, 0, LIMITS)
        except InvalidMeasurement:
            refused.add(nbytes // MIB)
    assert rows[-1]["K and V"] == "512 MiB"
    assert {128, 256, 512} <= refused  # all that L2 cannot hold; of what it can, some
    assert min(rates[3], rates[4], *rates[7:]) > 2
    assert f"by up to {max(rates):.1f} times" in document
    assert "\n" + audit.bandwidth_block() + "\n" == between(document, "bandwidth"), STALE


def test_published_times_over_the_number_of_keys(document):
    for lines in audit.PUBLISHED.values():
        assert lines[1024].sdpa == pytest.approx(lines[64].sdpa, rel=0.02)
    eight = audit.PUBLISHED[audit.Shape(1024, 8, 128)]
    assert f"grows {eight[1024].triton / eight[64].triton:.1f} times from 64 to 1024 keys (H = 8)" in document
    slower = [line.triton / line.sdpa for lines in audit.PUBLISHED.values() for line in lines.values()]
    assert round(min(slower)) == 2
    assert round(max(slower)) == 25
    assert max(line.error for lines in audit.PUBLISHED.values() for line in lines.values()) == pytest.approx(
        0.15, rel=0.01
    )
    assert sum(map(len, audit.PUBLISHED.values())) == 10


# --- what is known instead -------------------------------------------------------------------------------------------


def test_measured_table_shows_the_committed_baselines(document):
    recordings = recording.newest(audit.BASELINES)
    assert "\n" + audit.measured_block(recordings) + "\n" == between(document, "measured"), STALE
    wanted = {f"test_selection[H8-D128-Dv128-L{L}-N1024-few-bf16]" for L in audit.LENGTHS}
    facts = [fact for one in recordings for fact in one.facts if fact["name"] in wanted and one.gpu]
    assert len(facts) >= len(wanted)
    for fact in facts:
        assert fact["checked"]
        assert fact["timing"]["cold"]
        best = fact["median"] * fact["speedup_vs_sdpa_best"]
        cells = (fact["L"], f"{fact['median'] * 1e6:.1f}", f"{best * 1e6:.1f}", f"`{fact['sdpa_best']}`")
        assert f"| {' | '.join(map(str, cells))} |" in document
        assert fact["share_of_ceiling"] < 1.05
        assert fact["mae"] <= 1e-3  # what the suite demands, and the report did


def test_compiled_table_claims_no_more_than_the_files(document):
    """Recorded again, kernels may be more and registers fewer: the page is then behind, not wrong."""
    rows = audit.table(document, "compiled")
    known = {found.release: found for found in audit.evidence()}
    assert rows
    for row in rows:
        release, kernels, *most = row.values()
        assert release in known, STALE
        assert int(kernels) <= known[release].kernels, STALE
        for claimed, now in zip(most, known[release][2:], strict=True):
            assert claimed == "-" or (now is not None and now <= int(claimed)), STALE


def test_compile_matrix_refuses_too_much_shared_memory(document):
    ada = ARCHITECTURES["sm_89"]
    assert f"more than the {ada.shared_bytes:,} bytes of shared memory" in document
    harmless = {"registers": 64, "spills": 0, "mma": True, "cluster": False, "early": False, "hasty": False}
    fine, over = (Compiled("p", "_combine_kernel", ada.shared_bytes + more, **harmless) for more in (0, 1))
    assert [len(list(budgets.complaints(ada, kernel, {fine.name: (64, 0)}))) for kernel in (fine, over)] == [0, 1]


def test_nobody_measured_the_card(document, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("NSA_SEL_TRITON_MIN_L", raising=False)
    monkeypatch.delenv("NSA_CONFIG", raising=False)
    settings.reload()
    try:
        slug = gpu.device_slug(CARD)
        places = [audit.BASELINES / slug, gpu.PACKAGED / f"{slug}.yaml"]
        assert not [path for path in places if path.exists()], "somebody measured it: rewrite docs/rtx4090-report.md"
        assert f"rows of fewer than {gpu.min_L_for(CARD)} keys use packed SDPA" in document
        assert "`python -m nsa calibrate` measures this GPU (a minute or two)" in caplog.text
    finally:
        monkeypatch.undo()
        settings.reload()
    assert "\npython -m nsa calibrate  " in document


def test_options_that_the_page_names(document, request):
    words = re.findall(r" (--[a-z][a-z-]+)", document)
    assert words == ["--nsa-update-thresholds", "--nsa-save-baseline"]
    for word in words:
        request.config.getoption(word)  # raises ValueError for one that there is not


# --- the page itself -------------------------------------------------------------------------------------------------


def test_every_figure_of_the_text_is_accounted_for(document):
    """Tables and code aside. A new figure has to be computed, or named here with where it comes from."""
    text = re.sub(r"(?s)<!-- (\w+): begin -->.*?<!-- \1: end -->|```.*?```|`[^`\n]*`", " ", document)
    quoted = {"4090", "20", "2025", "2.5.1", "3.1.0", "2048", "2", "25", "0.15", "10", "16", "256"}  # of the report
    card = {"1,008", "384", "21", str(audit.CACHE // MIB), f"{ARCHITECTURES['sm_89'].shared_bytes:,}"}
    shapes = {"1024", "128", "64", "8", "2", "1", "0"}  # rows, keys, heads, bytes, N(0, 1), seed 0; 16 = 1024 / 64
    tested = {"14.8", "15.0", "0.80", "2"}  # and the 2% of the errors
    assert str(audit.ROWS) == "256"
    assert audit.BANDWIDTH == 1008e9
    assert set(re.findall(r"\b\d+(?:[.,]\d+)*", text)) == quoted | card | shapes | tested


def test_blocks_are_replaced_between_their_markers():
    text = "a\n<!-- x: begin -->\n| L | t |\n| --- | --- |\n| 1 | 2 |\n<!-- x: end -->\nb\n"
    assert audit.table(text, "x") == [{"L": "1", "t": "2"}]
    assert audit.with_block(text, "x", "new") == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n"
    with pytest.raises(ValueError, match="expected one <!-- y: begin -->"):
        audit.with_block(text, "y", "new")


def between(document, name):
    """What stands between the markers of `name`."""
    return document.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
