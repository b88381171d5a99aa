"""Any strides: caches with the heads first, slices, broadcasts. Only the last dim has to be contiguous."""

import re

import pytest
import torch
import torch.nn.functional as F

import nsa
from nsa.kernels.shared.spans import ASK_EIGHT

from ...parity.pairs import in_pairs

B, S, KEYS, HKV = 2, 2, 20, 2


def amid(x, before, after, axis):
    """An equal view of a tensor that is longer along one axis."""
    zeros = [0, 0] * (x.dim() - 1 - axis)
    return F.pad(x, (*zeros, before, after), value=1e3).narrow(axis, before, x.shape[axis])


LAYOUTS = {
    "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence-first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads-of-more": lambda x: amid(x, 1, 2, 2),
    "every-other-head": lambda x: torch.stack((x * 1e3, x), 3)[:, :, :, 1],
    "sequence-of-more": lambda x: amid(x, 3, 2, 1),
    "odd-rows": lambda x: amid(x, 1, 2, 3),  # nothing is aligned
    # Stride 0: one for all batch entries, for all positions, for all heads.
    **{f"expanded-{axis}": lambda x, axis=axis: x.narrow(axis, 0, 1).expand_as(x) for axis in (0, 1, 2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(attend, agrees, draw, same, layout):
    """Queries, keys and values; the spans are the same for all rows, with strides of 0."""
    q, k, v = (LAYOUTS[layout](x) for x in draw(B=B, S=S, S_kv=KEYS, Dv=24))
    assert not k.is_contiguous()
    agrees(attend, q, k, v, ranges=same([(1, 6), (9, 15)], 1, 1, 1).expand(B, S, HKV, 2, 2))


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


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "k-transposed"])
def test_last_dim_must_be_contiguous(attend, draw, same, name):
    """`[B, S, D, H]` storage, as some caches of keys have it, is refused, too."""
    name, _, transposed = name.partition("-")
    tensors = dict(zip("qkv", draw(B=B, S=S, S_kv=KEYS), strict=True))
    tensors["out"] = torch.empty_like(tensors["q"])
    x = tensors[name]
    tensors[name] = x.mT.contiguous().mT if transposed else x.repeat_interleave(2, -1)[..., ::2]
    text = f"{name}: expected a contiguous last dimension (stride 1), got a strided one"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        attend(**tensors, ranges=same([(1, 6)], B, S, HKV))


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
