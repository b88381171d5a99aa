"""`python -m nsa`: the doctor, and calibration where it cannot work; calibration's flow with injected times."""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import nsa.__main__
import nsa.gpu
from nsa import doctor, settings
from nsa.guard import memory
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared import passed, sources
from nsa.testing.contestants.ours import OURS
from nsa.testing.matrix.case import Case
from nsa.tuning import calibrate, costs, thresholds

from ...conftest import bare

ROOT = Path(__file__).parents[3]
GPU, FILE = "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3.yaml"


BESIDE_TORCH = """
import runpy, sys, torch
before, started = set(sys.modules), []
sys.addaudithook(lambda event, arguments: started.append(event) if event in {events} else None)
sys.argv = ["nsa"]
try:
    runpy.run_module("nsa", run_name="__main__", alter_sys=True)
finally:
    print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}), *started, file=sys.stderr)
"""


def test_doctor_says_what_is_here_and_what_is_next():
    """Hardly later than torch is imported: it imports this package and YAML, no Triton, and starts no process."""
    program = BESIDE_TORCH.format(events=("subprocess.Popen", "os.fork", "os.posix_spawn"))
    how = {"env": bare(NSA_FORCE_PARITY="1"), "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, **how)
    assert done.returncode == 0
    names = [name for name in done.stderr.split() if "cython" not in name]  # what PyYAML's C loader brings
    assert names == ["nsa", "yaml"]
    lines = done.stdout.splitlines()
    assert lines[0] == "GPU        none"
    assert lines[1].startswith(f"versions   nsa {nsa.__version__}, torch {torch.__version__}, triton ")
    assert any(line.split() == ["force_parity", "true", "NSA_FORCE_PARITY"] for line in lines)
    split = lines.index("settings")
    assert sum(line.startswith("  ") for line in lines[split:]) == len(settings.NAMES)
    kernels = lines.index(f"kernels    {doctor.SHAPE}")
    reasons = {line.partition(": ")[2] for line in lines[kernels + 1 : split]}
    assert reasons == {"force_parity is set", "Triton route needs a CUDA device, got cpu"}
    assert lines[-1] == "next       pytest -m parity -n auto"


def test_doctor_names_a_setting_that_cannot_be_parsed(run_pytest):
    done = run_pytest.python("-m", "nsa", cwd=ROOT, environment=bare(NSA_FORCE_PARITY="perhaps"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nsa: NSA_FORCE_PARITY='perhaps': expected one of")


@pytest.mark.parametrize(("variables", "reason"), [
    ({}, "no usable NVIDIA GPU"), ({"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
], ids=["no-gpu", "interpreter"])  # fmt: skip
def test_calibrate_without_a_gpu_is_one_line(run_pytest, tmp_path, variables, reason):
    """It needs no pytest."""
    program = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(['pytest', 'hypothesis', 'pytest_benchmark'])); "
        "sys.argv = ['nsa', 'calibrate']; import nsa.tuning.calibrate; runpy.run_module('nsa', run_name='__main__')"
    )
    given = bare(XDG_CONFIG_HOME=str(tmp_path), **variables)
    done = run_pytest.python("-c", program, cwd=ROOT, environment=given)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nsa calibrate: {reason}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def gpu(monkeypatch, user_folder, gpus):
    """A machine whose GPU is never touched: parity holds and times are injected. All but its threshold is packaged."""
    facts = {"gpu": GPU, "torch": torch.__version__, "triton": "3.6.0", "commit": "abc123"}
    monkeypatch.setattr(calibrate, "obstacle", lambda: None)
    monkeypatch.setattr(calibrate, "check_parity", lambda device: None)
    monkeypatch.setattr(calibrate, "run_facts", lambda device: facts)
    monkeypatch.setattr(calibrate, "time_thresholds", lambda device: injected())
    monkeypatch.setattr(calibrate, "time_schedules", lambda device: rows())
    text = (ROOT / "nsa" / "configs" / "gpus" / FILE).read_text()
    (gpus / FILE).write_text(text[text.index("\ncosts:") + 1 :])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: GPU)
    monkeypatch.setattr(nsa.routing, "why_not_triton", lambda device: None)
    monkeypatch.setattr(sources, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(device_facts, "chip", lambda device: device_facts.Chip(90, 132, GPU, True))
    settings.reload()
    return user_folder / FILE


def injected(slow=None):
    """What calibration times, each case twice as fast as the path it replaces; 1.1 times at L = `slow`."""
    facts = []
    for case in thresholds.cases(thresholds.SQUARE, calibrate.ROWS):
        times = {"ranges": 1e-5, "sdpa": 1.1e-5 if case.L == slow else 2e-5}
        ends = {name: [t * 0.99, t * 1.01] for name, t in times.items()}
        fact = {"impl": "ranges", "median": 1e-5, "medians": times, "intervals": ends, "ci95": ends["ranges"]}
        facts.append(case.fields() | fact)
    layouts = {"heads_as_queries": 2e-5, "expanded": 4e-5, "enable_gqa": 1e-5}
    return facts + [{"layouts": layouts, "masked": masked} for masked in (False, True)]


def rows():
    """What calibration times of the schedules: a call of key-major takes 10 us, 256,000 numbers of query-major 1 us."""
    sizes = {"B": 1, "HQ": 8, "HKV": 1, "G": 8, "D": 128, "Dv": 128, "block_size": 64, "n": 16, "shared": 0.0}
    sizes |= {"paged": False, "fp8": False, "gpu": GPU, "torch": torch.__version__, "triton": "3.6.0", "commit": "a"}
    lengths = [2**i for i in range(4, 4 + costs.LEAST)]
    return [sizes | {"S": S, "S_kv": 2**20, "us": {"query_major": 1.024 * S, "key_major": 10.0}} for S in lengths]


def test_calibrate_writes_for_this_user_what_the_doctor_then_shows(gpu, monkeypatch, capsys, caplog):
    before = "\n".join(doctor.report())
    assert "sel_triton_min_L = 2048: this GPU was not measured" in before
    assert before.endswith("python -m nsa calibrate")
    monkeypatch.setattr(calibrate, "time_thresholds", lambda device: injected(slow=64))
    assert nsa.__main__.main(["calibrate"]) == 0
    said = capsys.readouterr().out
    assert f"sel_triton_min_L = 128, written to {gpu} (" in said
    assert "schedules: 16 drawn shapes, 100% within 5%, 100% within 15%, worst 1.00x; " in said
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert nsa.gpu.min_L_for(GPU) == 128
    found = nsa.gpu.measured(GPU)
    assert found.threshold.sdpa_layout == "enable_gqa"
    assert found.costs.kinds == {"narrow": {"query_major": {"numbers": 3.906}, "key_major": {"calls": 10.0}}}
    assert found.costs.provenance["command"] == "python -m nsa calibrate"
    assert (found.threshold.path, found.costs.path) == (gpu, gpu)
    assert found.tiles.path != gpu
    after = "\n".join(doctor.report())
    assert f"measured   sel_triton_min_L = 128, packed SDPA as enable_gqa, {gpu}" in after
    assert "commit             abc123" in after


@pytest.mark.parametrize(("mode", "listed", "text"), [
    ("auto", True, "passed the compile matrix; kernels are compiled in this process"),
    ("auto", False, "not on the list of the matrix; a child process compiles each kernel first, findings in {}"),
    ("always", True, "passed the compile matrix; a child process compiles each kernel first, findings in {}"),
    ("never", False, "not on the list of the matrix; kernels are compiled in this process, probe is never"),
])  # fmt: skip
def test_doctor_says_where_kernels_are_compiled(gpu, monkeypatch, tmp_path, mode, listed, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda package: "not installed")  # triton, by that name
    monkeypatch.setattr(sources, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(passed, "passed_pairs", lambda: {("3.6", "sm_90" if listed else "sm_89")})
    with nsa.configure(probe=mode):
        (line,) = [line for line in doctor.report() if line.startswith("compiled")]
    assert line == f"compiled   Triton 3.6.0 for sm_90: {text.format(tmp_path / 'nsa' / 'probe')}"


ON = {
    "packed rows": "query-major: no threshold, no fallback",
    "spans": "query-major (ranges): rows are long enough for Triton",
    "blocks, 8192 queries": "union (union): union is expected to be the fastest, measured on",
    "blocks, 1 query": "query-major (blocks): rows are long enough for Triton",
    "cache, 1 query": "query-major (blocks): rows are long enough for Triton",
    "cache, 2048 queries": "union (union): union is expected to be the fastest, measured on",
    "backward": "backward kernels: dQ, then dK and dV by key blocks: decided as forward",
}
ALL = [kind for kind in ON if kind != "packed rows"]  # that routing decides about; the backward pass comes last
BLOCKS = "query-major (blocks): rows are long enough for Triton"
PER_HEAD = "query-major, a head a program (per_head): rows are long enough for Triton"


@pytest.mark.parametrize(("values", "otherwise"), [
    ({"sel_triton_min_L": 0}, {}),
    ({"sel_triton_min_L": 1024}, {}),
    ({}, dict.fromkeys(ALL, "packed SDPA (sdpa): rows select at most 1024 keys, sel_triton_min_L is 2048")),
    ({"use_triton_sel": False}, dict.fromkeys(ALL, "packed SDPA (sdpa): use_triton_sel is off")),
    ({"force_parity": True}, dict.fromkeys(ALL, "the gather reference (reference): force_parity is set")),
    ({"sel_triton_min_L": 0, "batch_invariant": True}, {"blocks, 8192 queries": BLOCKS, "cache, 2048 queries": BLOCKS}),
    ({"sel_triton_min_L": 0, "sel_triton_group": False}, dict.fromkeys(ALL[:-1], PER_HEAD)),
], ids=["on", "just-on", "unmeasured", "off", "parity", "batch-invariant", "per-head"])  # fmt: skip
def test_doctor_says_which_kernel_serves_what(gpu, caplog, values, otherwise):
    with nsa.configure(**values):
        lines = doctor.report()
    first, last = lines.index(f"kernels    {doctor.SHAPE}") + 1, lines.index("settings")
    found = {line[2:23].strip(): line[24:] for line in lines[first:last]}
    assert list(found) == list(ON)
    for kind, text in (ON | otherwise).items():
        assert found[kind].startswith(text), kind
    assert caplog.records == [], "the doctor says itself that this GPU was not measured"


def test_doctor_knows_when_no_triton_is_installed(gpu, monkeypatch):
    monkeypatch.setattr(doctor, "triton_installed", lambda: False)
    with nsa.configure(sel_triton_min_L=0):
        lines = doctor.report()
    assert "Triton     not used: no Triton is installed" in lines
    served = [line.partition(": ")[::2] for line in lines[lines.index("settings") - len(ON) : lines.index("settings")]]
    assert {reason for _, reason in served} == {"no Triton is installed"}
    assert {server[24:] for server, _ in served} == {"refused", "packed SDPA (sdpa)"}


def test_doctor_names_kernels_that_a_child_found_broken(gpu, monkeypatch, tmp_path):
    """Of this Triton and GPU; not what worked, nor what another Triton broke, nor files that are none of ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)

    def remember(kernel, cause):
        what = {"kernel": kernel}
        memory.write(memory.key_of(what, device), memory.Verdict(cause, True), what)

    monkeypatch.setattr(sources, "triton_version", lambda: "3.1.0")
    remember("_dq_kernel", "wrong result: of another Triton")
    monkeypatch.setattr(sources, "triton_version", lambda: "3.6.0")
    remember("_fwd_kernel", "killed by SIGABRT while compiling")
    remember("_merge_kernel", None)
    (tmp_path / "nsa" / "probe" / "other.json").write_text("[1]")
    with nsa.configure(probe="auto"):
        refused = [line for line in doctor.report() if line.startswith("refused")]
        assert refused == ["refused    _fwd_kernel: killed by SIGABRT while compiling"]
        for number in range(4):
            remember(f"_z{number}", "hangs")
        lines = doctor.report()
    assert sum(line.startswith("refused") for line in lines) == 3
    assert "           and 2 more" in lines
    with nsa.configure(probe="never"):
        assert not any(line.startswith("refused") for line in doctor.report())


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "elsewhere"])
def test_doctor_names_commands_that_can_be_typed(gpu, monkeypatch, tmp_path, installed):
    """An installed package has no tests to run, and in another folder pytest finds none."""
    monkeypatch.setattr(doctor, "_version", lambda package: torch.__version__ if package == "torch" else "3.6.0")
    assert nsa.__main__.main(["calibrate"]) == 0
    monkeypatch.chdir(tmp_path if installed else ROOT)
    assert ("pytest" in doctor.report()[-1]) != installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ("pytest" in doctor.report()[-1]) != installed


def test_doctor_says_what_nobody_measured(gpu, gpus):
    packaged = gpus / FILE
    swept = yaml.safe_load(packaged.read_text())["tiles"]["query_major"]
    latest = max(entry["provenance"]["date"] for entry in swept)
    lines = doctor.report()
    assert f"tiles      of {len(swept)} shapes, swept {latest}, {packaged}" in lines
    assert lines[-2:] == ["  not measured on this GPU: threshold", "next       python -m nsa calibrate"]
    packaged.unlink()
    settings.reload()
    lines = doctor.report()
    assert "schedules  query-major, except for small blocks: costs were not measured" in lines
    assert "tiles      by rules: this GPU was not swept" in lines
    assert lines[-2] == "  not measured on this GPU: threshold and costs"


def test_doctor_says_whose_tiles_are_used(gpu, monkeypatch):
    name = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: name)
    assert f" shapes, swept on {GPU}, not on this GPU, 20" in next(x for x in doctor.report() if x.startswith("tiles"))


def test_calibrate_keeps_what_it_does_not_measure(gpu, gpus):
    text = (gpus / FILE).read_text()
    mine = text[text.index("\ntiles:") + 1 :].replace("us: 2.384", "us: 2.384000")
    gpu.parent.mkdir(parents=True)
    gpu.write_text(mine)
    assert nsa.__main__.main(["calibrate"]) == 0
    assert gpu.read_text().endswith(mine)
    assert nsa.gpu.measured(GPU).tiles.path == gpu


@pytest.mark.parametrize("error", [AssertionError("key-major and query-major differ by 1"), RuntimeError("no memory")])
def test_a_threshold_stays_where_costs_cannot_be_measured(gpu, monkeypatch, capsys, error):
    def fail(device):
        raise error

    monkeypatch.setattr(calibrate, "time_schedules", fail)
    assert nsa.__main__.main(["calibrate"]) == 1
    assert capsys.readouterr().err == f"nsa calibrate: costs not written: {error}\n"
    found = nsa.gpu.measured(GPU)
    assert found.threshold.path == gpu
    assert found.costs.path != gpu


def test_calibrate_writes_nothing_where_parity_fails(gpu, monkeypatch, capsys):
    def wrong(device):
        raise AssertionError("ranges on H8: error 1 > bound 0.1")

    monkeypatch.setattr(calibrate, "check_parity", wrong)
    assert nsa.__main__.main(["calibrate"]) == 1
    assert capsys.readouterr().err.strip() == "nsa calibrate: nothing written: ranges on H8: error 1 > bound 0.1"
    assert not gpu.exists()


def test_calibrate_checks_parity_of_every_kernel_source(device, monkeypatch):
    """On cases the interpreter affords: ours agree, and one that is off is named."""
    assert set(calibrate.PARITY) == {"dense_group", "varlen_group", "ranges", "blocks"}
    small = {
        "dense_group": Case(4, 64, 64, 40, 2, "few", "fp16"),
        "varlen_group": Case(4, 64, 64, 40, 2, "few", "fp16", source="varlen"),
        "ranges": Case(4, 64, 64, 40, 2, "mixed", "fp16", S_kv=100),
        "blocks": Case(4, 64, 64, 128, 2, "decode", "fp16", S_kv=256),
    }
    monkeypatch.setattr(calibrate, "PARITY", small)
    calibrate.check_parity(device)
    right = OURS["ranges"]

    def off(p, return_lse, out):
        result, lse = right.call(p, return_lse, out)
        return result * 1.1, lse

    monkeypatch.setitem(calibrate.OURS, "ranges", dataclasses.replace(right, call=off))
    with pytest.raises(AssertionError, match="^ranges on H4-D64"):
        calibrate.check_parity(device)
