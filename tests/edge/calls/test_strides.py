"""Any strides: caches with the heads first, slices, broadcasts. Only the last dim has to be contiguous."""

import re

import pytest
import torch

import nsa
from nsa.kernels.shared.primitives import ASK_EIGHT

from ...parity.pairs import in_pairs

B, S, KEYS, HKV = 2, 2, 20, 2


def arena(shape, like):
    """A buffer of that shape and of `like`'s dtype, filled with something that would show."""
    return torch.full(shape, 1e3, dtype=like.dtype, device=like.device)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def heads_of_more(x):
    big = arena((*x.shape[:2], x.shape[2] + 3, x.shape[3]), x)
    big[:, :, 1:-2] = x
    return big[:, :, 1:-2]


def every_other_head(x):
    big = arena((*x.shape[:2], 2 * x.shape[2], x.shape[3]), x)
    big[:, :, 1::2] = x
    return big[:, :, 1::2]


def sequence_of_more(x):
    big = arena((x.shape[0], x.shape[1] + 5, *x.shape[2:]), x)
    big[:, 3:-2] = x
    return big[:, 3:-2]


def odd_rows(x):
    """Rows 3 elements longer than a head, beginning at an odd one: nothing is aligned."""
    big = arena((*x.shape[:3], x.shape[3] + 3), x)
    big[..., 1:-2] = x
    return big[..., 1:-2]


LAYOUTS = [heads_first, sequence_first, heads_of_more, every_other_head, sequence_of_more, odd_rows]


@pytest.mark.parametrize("which", ["q", "kv"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__.replace("_", "-"))
def test_strided_inputs(attend, agrees, draw, same, layout, which):
    q, k, v = draw(B=B, S=S, S_kv=KEYS, Dv=24)
    ranges = same([(1, 6), (9, 15)], B, S, HKV)
    want = agrees(attend, q, k, v, ranges=ranges)
    if which != "kv":
        q = layout(q)
        assert not q.is_contiguous()
    if which != "q":
        k, v = layout(k), layout(v)
        assert not k.is_contiguous()
    got = attend(q, k, v, ranges=ranges, return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_keys_and_values_interleaved(attend, agrees, draw, same, dtype):
    """One buffer `[B, S_kv, 2, HKV, D]`, as some caches are; and q as a slice of a fused projection."""
    q, k, v = draw(B=B, S=S, S_kv=KEYS, dtype=dtype)
    kv = torch.stack((k, v), 2)
    fused = torch.cat((q, k[:, :S], v[:, :S]), 2)
    agrees(attend, fused[:, :, :4], kv[:, :, 0], kv[:, :, 1], ranges=same([(1, 6), (9, 15)], B, S, HKV))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "sequence", "heads"])
def test_expanded_inputs(attend, agrees, draw, same, axis):
    """Stride 0: one cache for all batch entries, one key for all positions, one KV head for all."""
    q, k, v = draw(B=B, S=S, S_kv=KEYS)
    k, v = (x.narrow(axis, 0, 1).expand_as(x) for x in (k, v))
    assert k.stride(axis) == 0
    agrees(attend, q, k, v, ranges=same([(1, 6), (9, 15)], B, S, HKV))
    agrees(attend, q.narrow(1, 0, 1).expand_as(q), k, v, ranges=same([(1, 6)], B, S, HKV))


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
def test_strided_packed_batch(attend, agrees, draw, same, device, axis):
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in draw(S=4, S_kv=12, varlen=True))
    if axis == 1:
        k, v = (torch.cat((x, x * 1e3), 1)[:, :2] for x in (k, v))
    cu = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    agrees(attend, q, k, v, ranges=same([(0, 2)], 4, 2), cu_seqlens=cu)


def test_strided_selections(attend, draw, same):
    """The selection as a slice, a transpose and an expansion of other tensors."""
    q, k, v = draw(B=B, S=S, S_kv=KEYS)
    ranges = same([(1, 6), (9, 15), (0, 3), (2, 9)], B, S, HKV)
    ranges += torch.arange(S, device=ranges.device, dtype=ranges.dtype).view(1, S, 1, 1, 1)
    want = attend(q, k, v, ranges=ranges[:, :, :, ::2].contiguous())
    assert torch.equal(attend(q, k, v, ranges=ranges[:, :, :, ::2]), want)
    assert torch.equal(attend(q, k, v, ranges=ranges.transpose(0, 1).contiguous().transpose(0, 1)[:, :, :, ::2]), want)
    one = ranges[:, :, :1, ::2]
    assert torch.equal(attend(q, k, v, ranges=one.expand(-1, -1, HKV, -1, -1)), want)
    blocks = torch.arange(8, device=q.device).view(1, 1, 1, 8)
    got = attend(q, k, v, block_indices=blocks.expand(B, S, HKV, 8)[..., 1::3], block_size=3)
    assert torch.equal(got, attend(q, k, v, block_indices=same([1, 4, 7], B, S, HKV), block_size=3))


def test_selection_at_an_unaligned_address(attend, draw, device):
    """Spans that begin 8 bytes into an allocation: loads may not be as wide as for a fresh tensor."""
    q, k, v = draw(S=S, S_kv=KEYS)
    flat = torch.arange(1 + S * HKV * 3, device=device, dtype=torch.int32)
    ranges = torch.stack((flat, flat + 4), -1)[1:].view(1, S, HKV, 3, 2)
    assert torch.equal(attend(q, k, v, ranges=ranges), attend(q, k, v, ranges=ranges.clone()))


@pytest.mark.parametrize(
    ("n", "selected", "offset"), in_pairs((1, 2, 3, 5, 8), {"int32": torch.int32, "int64": torch.int64}, (0, 1, 2))
)
def test_ranges_of_any_number_at_any_address(attend, agrees, draw, device, n, selected, offset):
    """Few keys: every thread of a program asks for all spans of its row, two at a time where they are aligned."""
    q, k, v = draw(B=B, S=2, S_kv=KEYS, HKV=HKV)
    generator = torch.Generator().manual_seed(n)
    edges = torch.randint(-3, KEYS + 4, (B, 2, HKV, 2 * n), generator=generator).sort(-1).values
    spans = edges.view(B, 2, HKV, n, 2)[..., torch.randperm(n, generator=generator), :].to(selected)
    ranges = torch.zeros(spans.numel() + offset, dtype=selected, device=device)[offset:].view(spans.shape).copy_(spans)
    agrees(attend, q, k, v, ranges=ranges, max_selected=KEYS)


def run_assembly(text, memory, at, n):
    """What `ASK_EIGHT` leaves in its registers; `memory` holds int32 by address. Aligned loads only, like a GPU's."""
    lines = [x.strip() for x in re.sub(r"(\w+):", r"\1:;", text.strip("{} \n")).split(";") if x.strip()]
    registers = {"$16": at, "$17": n}
    value = lambda x: registers[x] if x in registers else int(x)  # noqa: E731
    line = 0
    while line < len(lines):
        guard, _, rest = lines[line].partition(" ") if lines[line].startswith("@") else ("", "", lines[line])
        operation, _, operands = rest.partition(" ")
        line += 1
        if operation.startswith(".reg") or operation.endswith(":") or (guard and not registers[guard[1:]]):
            continue
        x = re.findall(r"[$\w]+", operands)
        kind = operation.split(".")[0]
        if kind == "bra":
            line = lines.index(x[0] + ":")
        elif kind == "ld":
            *to, base, far = x if "+" in operands else (*x, "0")
            address = registers[base] + int(far)
            assert address % (4 * len(to)) == 0
            registers.update({r: memory[address + 4 * i] for i, r in enumerate(to)})
        else:
            run = {"mov": lambda a: a, "cvt": lambda a: a, "and": lambda a, b: a & b, "or": lambda a, b: a | b}
            run |= {"setp": (lambda a, b: a > b) if ".gt." in operation else (lambda a, b: a != b)}
            registers[x[0]] = run[kind](*(value(y) for y in x[1:]))
    return [registers[f"${i}"] for i in range(16)]


@pytest.mark.parametrize("address", [0, 4, 8, 12])
@pytest.mark.parametrize("n", range(9))
def test_assembly_asks_for_the_ranges_that_exist(n, address):
    memory = {address + 4 * i: 100 + i for i in range(2 * n)}
    assert run_assembly(ASK_EIGHT.value, memory, address, n) == [*memory.values()] + [0] * (16 - 2 * n)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_last_dim_must_be_contiguous(attend, draw, same, name):
    tensors = dict(zip("qkv", draw(B=B, S=S, S_kv=KEYS), strict=True))
    tensors["out"] = torch.empty_like(tensors["q"])
    x = tensors[name]
    tensors[name] = x.repeat_interleave(2, -1)[..., ::2]
    text = f"{name}: expected a contiguous last dimension (stride 1), got a strided one"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        attend(**tensors, ranges=same([(1, 6)], B, S, HKV))


def test_transposed_last_dim_is_refused(attend, draw, same):
    """`[B, S, D, H]` storage, as some caches of keys have it."""
    q, k, v = draw(B=B, S=S, S_kv=KEYS)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"^k: expected a contiguous last dimension \(stride 1\), got a strided one$"):
        attend(q, k, v, ranges=same([(1, 6)], B, S, HKV))


@pytest.mark.parametrize("source", ["ranges", "blocks", "rows"])
def test_keys_further_apart_than_int32_counts(draw, same, device, source, variants):
    """Odd strides are counted in elements, else in up to 16 at a time. Of a buffer of 4 GiB a few pages are touched."""
    near = draw(S=1, HKV=1, S_kv=5, dtype=torch.float16)
    apart = 2**29 + 1
    buffer = torch.empty(4 * apart + 64, dtype=torch.float16, device=device)
    k, v = (buffer[i * 32 :].as_strided((1, 5, 1, 16), (1, apart, 1, 1)).copy_(x) for i, x in enumerate(near[1:]))
    assert 4 * k.stride(1) > 2**31

    def run(q, k, v):
        if source == "rows":
            return nsa.sel_attn_fwd_dense_group(q[:, 0], k[:, :, 0], v[:, :, 0], return_lse=True)
        spans = {"ranges": same([(3, 5), (0, 2)], 1, 1, 1)}
        blocks = {"block_indices": same([1, 0], 1, 1, 1), "block_size": 3}
        how = spans if source == "ranges" else blocks
        return nsa.selection_attention(q, k, v, **how, backend="triton", return_lse=True)

    torch.testing.assert_close(run(near[0], k, v), run(*near), rtol=0, atol=0)
    assert {made["FAR"] for made in variants} == {True, False}
