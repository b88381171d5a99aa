"""`python -m nsa`: the doctor, and calibration where it cannot work; calibration's flow with injected times."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nsa.__main__
import nsa.probe
from nsa import schedules, settings
from nsa.testing import calibrate, thresholds
from nsa.testing.cases import Case
from nsa.testing.impls import OURS

ROOT = Path(calibrate.__file__).parents[2]
GPU = "NVIDIA H100 80GB HBM3"


def run(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NSA_") and k != "TRITON_INTERPRET"}
    kept |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, "-m", "nsa", *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)


def test_doctor_says_what_is_here_and_what_is_next():
    done = run(NSA_FORCE_PARITY="1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "GPU        none"
    assert lines[1].startswith(f"versions   nsa {nsa.__version__}, torch {torch.__version__}, triton ")
    assert any(line.split() == ["force_parity", "true", "NSA_FORCE_PARITY"] for line in lines)
    assert sum(line.startswith("  ") for line in lines) == len(settings.NAMES)
    assert lines[-1].startswith("next       ")


def test_doctor_takes_hardly_longer_than_importing_torch():
    def seconds(*command):
        """Of processor time: neighbours on a shared machine do not count."""
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a driver's start is no doing of ours
        before = os.times()
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    bare = min(seconds("-c", "import torch") for _ in range(2))
    assert min(seconds("-m", "nsa") for _ in range(2)) < bare + 1.0


def test_doctor_names_a_setting_that_cannot_be_parsed():
    done = run(NSA_FORCE_PARITY="perhaps")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nsa: NSA_FORCE_PARITY='perhaps': expected one of")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "no usable NVIDIA GPU"), ({"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set")],
    ids=["no-gpu", "interpreter"],
)
def test_calibrate_without_a_gpu_is_one_line(tmp_path, environment, reason):
    done = run("calibrate", XDG_CONFIG_HOME=str(tmp_path), **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nsa calibrate: {reason}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_calibrate_needs_no_pytest():
    block = "import sys; sys.modules.update(dict.fromkeys(['pytest', 'hypothesis', 'pytest_benchmark']))\n"
    command = [sys.executable, "-c", block + "import nsa.testing.calibrate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine whose GPU is never touched: parity holds and times are injected."""
    facts = {"gpu": GPU, "torch": torch.__version__, "triton": "3.6.0", "commit": "abc123"}
    monkeypatch.setattr(calibrate, "obstacle", lambda: None)
    monkeypatch.setattr(calibrate, "check_parity", lambda device: None)
    monkeypatch.setattr(calibrate, "run_facts", lambda device: facts)
    monkeypatch.setattr(calibrate, "time_thresholds", lambda device: injected())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "packaged_devices", lambda: tmp_path / "nothing packaged")
    monkeypatch.delenv("NSA_SEL_TRITON_MIN_L", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: GPU)
    monkeypatch.setattr(nsa.dispatch, "why_not_triton", lambda device: None)
    monkeypatch.setattr(nsa.probe, "architecture", lambda device: "sm_90")
    settings.reload()
    yield tmp_path / "nsa" / "devices" / "nvidia-h100-80gb-hbm3.yaml"
    monkeypatch.undo()
    settings.reload()


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


def test_calibrate_writes_for_this_user_what_the_doctor_then_shows(gpu, monkeypatch, capsys, caplog):
    before = "\n".join(nsa.__main__.doctor())
    assert "sel_triton_min_L = 2048: nobody measured this GPU" in before
    assert before.endswith("python -m nsa calibrate")
    monkeypatch.setattr(calibrate, "time_thresholds", lambda device: injected(slow=64))
    assert nsa.__main__.main(["calibrate"]) == 0
    assert f"sel_triton_min_L = 128, written to {gpu} (" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert settings.min_L_for(GPU) == 128
    assert settings.device_config(GPU).sdpa_layout == "enable_gqa"
    after = "\n".join(nsa.__main__.doctor())
    assert f"measured   sel_triton_min_L = 128, packed SDPA as enable_gqa, {gpu}" in after
    assert "commit             abc123" in after


@pytest.mark.parametrize(
    ("mode", "listed", "text"),
    [
        ("auto", True, "passed the compile matrix; kernels are compiled in this process"),
        ("auto", False, "not on the list of the matrix; a child process compiles each kernel first, findings in {}"),
        ("always", True, "passed the compile matrix; a child process compiles each kernel first, findings in {}"),
        ("never", False, "not on the list of the matrix; kernels are compiled in this process, probe is never"),
    ],
)
def test_doctor_says_where_kernels_are_compiled(gpu, monkeypatch, tmp_path, mode, listed, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nsa.__main__, "_version", lambda package: "not installed")  # triton, by that name
    monkeypatch.setattr(nsa.probe, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(nsa.probe, "passed_pairs", lambda: {("3.6", "sm_90" if listed else "sm_89")})
    with nsa.configure(probe=mode):
        (line,) = [line for line in nsa.__main__.doctor() if line.startswith("compiled")]
    assert line == f"compiled   Triton 3.6.0 for sm_90: {text.format(tmp_path / 'nsa' / 'probe')}"


def test_doctor_says_from_where_key_major_is_used(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(schedules, "FOLDER", tmp_path)
    schedules.measured.cache_clear()
    (line,) = [line for line in nsa.__main__.doctor() if line.startswith("schedules")]
    assert line == "schedules  query-major everywhere: nobody measured key-major"


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
