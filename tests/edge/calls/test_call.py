"""One call as one object: what it says of itself, and what plain torch would say of it that we say, too."""

import ast
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import nsa
from nsa import dispatch, ops, routing, settings
from nsa.call import TENSORS, Call
from nsa.kernels.key_major import tiles as key_tiles

from ...parity.pairs import in_pairs
from ..kernels.gradients import exact

ROOT = Path(nsa.__file__).parent
PUBLIC = {
    "selection_attention", "selection_attention_with_kvcache", "selection_attention_triton", "pack_rows",
    "grouped_selection_attention_packed", "qsa_sparse_paged_attention", "select_blocks",
    *(f"sel_attn_fwd_{name}" for name in ("dense", "varlen")),
    *(f"sel_attn_fwd_{name}_group" for name in ("dense", "varlen")),
}  # fmt: skip
ARGUMENTS = set(Call._fields) - {"settings"} | {"cu_seqlens", "k_cache", "v_cache", "page_size"}


@pytest.fixture
def problem(draw, same):
    """A call whose spans are the same for every row."""
    return draw(), {"ranges": same([(0, 7), (9, 24)], 1, 3, 2)}


def test_arguments_are_spelled_at_the_front_doors_and_in_call_alone():
    """A function with more than five of them would be one more place to change for a new argument."""
    found = {}
    for path in ROOT.rglob("*.py"):
        if "testing" in path.parts or "tuning" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.dump(x) for x in node.decorator_list):
                arguments = node.args
                names = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
                if len(names & ARGUMENTS) > 5 and node.name not in PUBLIC:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = sorted(names & ARGUMENTS)
    assert found == {}


def test_tensors_come_first(problem):
    qkv, selection = problem
    call = Call(*qkv, **selection, max_selected=9)
    assert all(isinstance(x, torch.Tensor) for x in call.tensors if x is not None)
    assert not any(isinstance(x, torch.Tensor) for x in call[TENSORS:])
    assert ops._of_arguments(ops._arguments(call))._replace(return_lse=False) == call._replace(settings=settings.get())


# --- out= -------------------------------------------------------------------------------------------------------------


def test_a_written_out_is_a_modified_tensor(problem, attend_all):
    """Else the backward pass of what was computed from it before gives wrong gradients without an error."""
    qkv, selection = problem
    x = torch.ones_like(qkv[0])
    weight = torch.ones_like(x, requires_grad=True)
    loss = (weight * x).sum()
    before = x._version
    with torch.no_grad():
        attend_all(*qkv, **selection, out=x)
    assert x._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        o = attend_all(*qkv, **selection, out=torch.empty_like(x))
    torch.testing.assert_close(o, x)


@pytest.mark.parametrize("backend", ["triton", "sdpa", "reference"])
def test_what_is_no_out(problem, backend):
    qkv, selection = problem
    leaf, shape = torch.empty_like(qkv[0]).requires_grad_(), qkv[0].shape
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        nsa.selection_attention(*qkv, **selection, backend=backend, out=leaf)
    with torch.no_grad():
        assert nsa.selection_attention(*qkv, **selection, backend=backend, out=leaf) is leaf
    overlapping = qkv[0].new_empty(1000).as_strided(shape, (16, 16, 8, 1))
    for out in (qkv[0].new_empty(shape[-1]).expand(shape), overlapping):
        with pytest.raises(ValueError, match="out: expected no elements that share memory, got strides"):
            nsa.selection_attention(*qkv, **selection, backend=backend, out=out)


# --- numbers and autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", "sdpa", "reference"])
def test_any_real_number_is_a_scale(problem, backend):
    qkv, selection = problem
    want = nsa.selection_attention(*qkv, **selection, backend=backend, scale=0.25)
    assert torch.equal(nsa.selection_attention(*qkv, **selection, backend=backend, scale=Fraction(1, 4)), want)


def test_half_a_pair_of_sequences_is_refused_under_autocast(draw, same, device):
    q, k, v = draw(S=3, S_kv=24, varlen=True)
    cu = torch.tensor([0, 3], dtype=torch.int32, device=device)
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        pytest.raises(TypeError, match="cu_seqlens: expected a tensor or a pair of tensors, got a pair with None"),
    ):
        nsa.selection_attention(q, k, v, ranges=same([(0, 7)], 3, 2), cu_seqlens=(None, cu))


# --- planning ---------------------------------------------------------------------------------------------------------


def test_a_training_step_plans_once(problem, fresh_plans, monkeypatch):
    qkv, selection = problem
    made, make = [], routing.make_plan
    monkeypatch.setattr(routing.plan, "__defaults__", (None, lambda call: made.append(call) or make(call)))
    looked_up, key = [], Call.key
    monkeypatch.setattr(Call, "key", lambda call: looked_up.append(call) or key(call))
    leaves = [x.requires_grad_() for x in qkv]
    for _ in range(2):
        nsa.selection_attention(*leaves, **selection, backend="triton").sum().backward()
    assert (len(made), len(looked_up)) == (1, 2)


def test_tiles_of_key_major_may_be_forced_at_any_time(draw, same, pin, monkeypatch, fresh_plans):
    """A sweep forces them after a first call."""
    from nsa.kernels.key_major import plan as key_major

    q, k, v = (x.half() for x in draw(G=1))
    planned, plan = [], key_major.plan
    monkeypatch.setattr(key_major, "plan", lambda *args: planned.append(plan(*args)) or planned[-1])
    for forced in (None, None, key_tiles.FP32, None):
        pin(key_major=forced)
        nsa.selection_attention(
            q, k, v, block_indices=same([0, 1], 1, 3, 2), block_size=8, backend="triton", schedule="key_major"
        )
    assert len(planned) == 2


def test_debug_timing_names_its_own_route(problem, caplog, monkeypatch):
    """While another thread's calls take another one."""
    qkv, selection = problem
    run = dispatch.plain

    def plain(*args):
        thread = threading.Thread(target=lambda: nsa.selection_attention(*qkv, **selection, backend="reference"))
        monkeypatch.setattr(dispatch, "plain", run)
        thread.start()
        thread.join()
        return run(*args)

    monkeypatch.setattr(dispatch, "plain", plain)
    with nsa.configure(debug_timing=True), caplog.at_level("INFO", logger="nsa"):
        nsa.selection_attention(*qkv, **selection, backend="sdpa")
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["route sdpa"]


# --- frozen keys and values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "kind", "compiled"),
    in_pairs(("q", "k", "v", "kv", "qv"), ("ranges", "blocks"), {"eager": False, "operator": True}),
)
def test_only_wanted_gradients_are_computed(draw, same, wanted, kind, compiled, monkeypatch):
    from nsa.kernels.shared.launch import Variant

    leaves = {name: x.requires_grad_(name in wanted) for name, x in zip("qkv", draw(S=3, S_kv=24), strict=True)}
    selection = {"ranges": same([(0, 7), (9, 24)], 1, 3, 2)}
    if kind == "blocks":
        selection = {"block_indices": same([0, 2], 1, 3, 2), "block_size": 8}
    call = Call(*leaves.values(), **selection, backend="triton")
    names, launch = [], Variant.launch
    monkeypatch.setattr(
        Variant, "launch", lambda self, *args: names.append(self.kernel.fn.__name__) or launch(self, *args)
    )
    o = torch.ops.nsa.selection_attention(*ops._arguments(call))[0] if compiled else ops.serve(call)[0]
    got = torch.autograd.grad(o.sum(), [leaves[name] for name in wanted])
    assert ("_dkdv_kernel" in names) == (wanted != "q")
    assert ("_dq_kernel" in names or "_gather_kernel" in names) == ("q" in wanted)
    want = dict(zip("qkv", exact(*leaves.values(), torch.ones_like(o), **selection), strict=True))
    for a, name in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), want[name], rtol=0, atol=2e-5)


# --- packed rows ------------------------------------------------------------------------------------------------------


def test_packed_rows_obey_autocast(device):
    Q, K, V = (torch.randn(2, n, 16, device=device) for n in (4, 9, 9))
    low = torch.bfloat16 if device.type == "cuda" else torch.float16
    want = nsa.sel_attn_fwd_dense_group(Q.to(low), K.to(low), V.to(low))
    with torch.autocast(device.type, dtype=low):
        assert torch.equal(nsa.sel_attn_fwd_dense_group(Q, K, V), want)


def test_vmap_of_packed_rows_is_refused_in_our_words(device):
    Q, K, V = (torch.randn(3, 2, n, 16, device=device) for n in (4, 9, 9))
    with pytest.raises(RuntimeError, match="selection_attention has no vmap rule: fold the mapped axis into the batch"):
        torch.vmap(nsa.sel_attn_fwd_dense_group)(Q, K, V)
    with pytest.raises(RuntimeError, match="packed rows have no rule for transforms of torch.func"):
        torch.func.grad(lambda Q: nsa.sel_attn_fwd_dense_group(Q, K[0], V[0]).sum())(Q[0])


def test_the_walk_of_a_planned_call(problem, device):
    """From the front door to the launch: nine functions of another file at most, as CONTRIBUTING describes them."""
    (q, k, v), selection = problem
    package, entered = str(Path(nsa.__file__).parent), []

    def enter(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package) and "launch.launch" not in entered:
            file, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
            if file != caller:
                entered.append(f"{Path(file).stem}.{frame.f_code.co_name}")

    for _ in range(2):
        entered.clear()
        sys.setprofile(enter)
        try:
            nsa.selection_attention(q, k, v, **selection, max_selected=24, backend="triton")
        finally:
            sys.setprofile(None)
    assert len(entered) <= 9, entered
    described = (Path(package).parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert entered[-1] == "launch.launch"
    steps = [name for name in entered if not name.startswith(("settings.", "call."))]
    assert [name for name in steps if f"{name}`" not in described] == [], "CONTRIBUTING, How a call runs"
