"""Compiling ahead: every case runs once, in other processes, and what breaks there breaks nothing here."""

import dataclasses
import os

import pytest
import torch

from nsa.testing.clock import precompile, training
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import prefill

CASE = Case(4, 16, 16, 32, 2, "many", "fp32", S_kv=128)
CPU = torch.device("cpu")


def leave_a_trace(case, device):
    """In a child, which imports this file."""
    if case.L == 48:
        os._exit(1)
    path = os.path.join(os.environ["NSA_TRACES"], str(case.L))
    with open(path, "x") as file:
        file.write(str(os.getpid()))


@pytest.fixture
def traces(monkeypatch, tmp_path):
    monkeypatch.setenv("NSA_TRACES", str(tmp_path))
    monkeypatch.setattr(precompile, "_run", leave_a_trace)
    return tmp_path


def of_lengths(*lengths):
    return precompile.jobs([dataclasses.replace(CASE, L=L) for L in lengths])


def test_every_case_in_a_child(traces):
    precompile.compile_ahead(of_lengths(16, 32, 64), CPU, 2)
    assert {path.name for path in traces.iterdir()} == {"16", "32", "64"}
    assert str(os.getpid()) not in {path.read_text() for path in traces.iterdir()}


def test_a_child_that_dies_is_survived(traces):
    precompile.compile_ahead(of_lengths(16, 48), CPU, 1)
    assert {path.name for path in traces.iterdir()} <= {"16"}


def test_long_prompts_are_compiled_for_on_shorter_ones():
    """Once for all lengths of a group, whatever their selections share."""
    long = [prefill(T, 32, HKV, shared=f) for T in (8192, 65_536) for HKV in (4, 8) for f in (0.0, 0.9)]
    short = prefill(8192, 32, 4), prefill(8192, 32, 8)
    found = precompile.jobs([*long, CASE], [prefill(65_536, 32, 8)])
    assert found == [(precompile._train, short[1]), *((precompile._run, case) for case in (*short, CASE))]


def test_gradients_are_taken_of_what_is_trained(monkeypatch):
    taken = []
    monkeypatch.setattr(precompile.training, "ours", lambda: training.Trainee("ours", None, lambda case: None))
    monkeypatch.setattr(precompile.training, "beside", lambda: (training.Trainee("other", None, lambda case: "no"),))
    monkeypatch.setattr(precompile.training, "gradients", lambda one, problem, do: taken.append((one.name, do.shape)))
    precompile._train(CASE, CPU)
    assert taken == [("ours", CASE.make("cpu").q.shape)]


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), AssertionError("wrong")])
def test_a_case_that_fails_is_left_to_the_run(monkeypatch, error):
    ran = []

    def make(case, device):
        ran.append((case, device))
        raise error

    monkeypatch.setattr(Case, "make", make)
    precompile._run(CASE, CPU)
    assert ran == [(CASE, CPU)]
