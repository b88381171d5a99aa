"""What the suite asks of a contestant beside its numbers: what comes back, and that inputs stay as they are."""

import re

import pytest

from nsa.testing.contestants import named
from nsa.testing.judge.conduct import untouched
from nsa.testing.matrix.case import Case

CASE = Case(2, 16, 16, 24, 4, "mixed", "fp32", HKV=2, S=1, S_kv=40)
ROWS = Case(2, 16, 16, 9, 2, "few", "fp32")
KERNELS = """
from nsa.call import Call
from nsa.plain.oracle import selection_reference


def right(q, k, v, return_lse=False, **how):
    o, lse = selection_reference(Call.of(q, k, v, **how, return_lse=return_lse))
    return (o, lse) if return_lse else o


def no_lse(*args, return_lse, **how):
    return right(*args, **how)


def three(*args, return_lse, **how):
    return (*right(*args, **how, return_lse=True), None) if return_lse else right(*args, **how)


def always_a_pair(*args, return_lse, **how):
    return right(*args, **how, return_lse=True)


def a_list(*args, return_lse, **how):
    return list(right(*args, **how, return_lse=True)) if return_lse else right(*args, **how)


def nothing(*args, return_lse, **how):
    return None


def flat(*args, return_lse, **how):
    o, lse = right(*args, **how, return_lse=True)
    return (o.flatten(), lse.flatten()) if return_lse else o.flatten()


def lse_4d(*args, return_lse, **how):
    o, lse = right(*args, **how, return_lse=True)
    return (o, lse[..., None]) if return_lse else o


def double_lse(*args, return_lse, **how):
    o, lse = right(*args, **how, return_lse=True)
    return (o, lse.double()) if return_lse else o


def scales_in_place(q, k, v, **how):
    found = right(q, k, v, **how)
    q.mul_(2)
    return found


def flat_rows(Q, K, V):
    return Q.flatten()


not_callable = 3
"""
WRONG = {
    "no_lse": "expected (O, LSE) with return_lse=True, got a Tensor",
    "three": "expected (O, LSE) with return_lse=True, got a tuple of 3",
    "always_a_pair": "expected a tensor O, got a tuple of 2",
    "a_list": "expected (O, LSE) with return_lse=True, got a list",
    "nothing": "expected a tensor O, got a NoneType",
    "flat": "expected O of shape (2, 1, 4, 16), got (128,)",
    "lse_4d": "expected LSE of shape (2, 1, 4), got (2, 1, 4, 1)",
    "double_lse": "expected an LSE in float32, got torch.float64",
    "scales_in_place": "wrote to its input q",
}


@pytest.fixture
def run(device, monkeypatch, tmp_path):
    """`run(name, kind)`: a kernel of `KERNELS`, with and without an LSE."""
    (tmp_path / "contract_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)

    def both(name, kind=""):
        impl = named.load(f"contract_kernels:{name}{kind}")
        p = (ROWS if kind else CASE).make(device)
        for return_lse in (False, True) if impl.lse else (False,):
            with untouched(impl.name, p):
                impl.run(p, return_lse)

    return both


def test_what_is_right_passes(run):
    run("right")


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_named(run, name):
    with pytest.raises(AssertionError, match=re.escape(f"contract_kernels:{name}: {WRONG[name]}")):
        run(name)


def test_packed_rows_of_another_shape(run):
    with pytest.raises(AssertionError, match=re.escape("expected O of shape (2, 2, 16), got (64,)")):
        run("flat_rows", "@dense")


def test_what_is_no_function(run):
    with pytest.raises(ValueError, match="--nsa-impl contract_kernels:not_callable: expected a function, got a int"):
        run("not_callable")
