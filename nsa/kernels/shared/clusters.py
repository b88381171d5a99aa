"""Programs of a cluster exchange their parts of a row through shared memory. NVIDIA, sm_90 and newer.

Each program of a cluster of ``C`` has read some of a row's keys and merges some of the row's heads: program ``g % C``
merges head ``g``, as number ``g // C`` of its ``M`` heads. The parts that a program merges arrive in its *inbox*,
ordered by sender and head. A part is an accumulator, a maximum and a sum, fp32 ``[C, M, BLOCK_DV + 4]``; its last two
elements only align the next part. A program first lays out the parts that it sends in its own shared memory, the
*outbox*, ordered by receiver, so that whole lines are sent. The receiver's barrier counts the bytes that arrive
(``st.async``, PTX ISA 9.7.9.12). So each program waits on its own barrier for the bytes it merges, not on a
cluster-wide fence.
"""

import triton
import triton.language as tl

from nsa.kernels.shared.sizes import BARRIER_BYTES, box_bytes, merged_heads
from nsa.kernels.shared.softmax import finish

HEADER = tl.constexpr(BARRIER_BYTES)


def sending(heads: int, block_dv: int, cluster: int, threads: int) -> str:
    """Assembly that sends the outbox. Operands: the inbox's address ($1) and the program's number in the cluster ($2).

    Each thread sends 16 bytes at a time, and loads all its bytes before it sends the first.
    """
    lines = merged_heads(heads, cluster) * (block_dv + 4) // 4  # of 16 bytes, from one program to another
    total = min(heads, cluster) * lines
    whole = -(-(2**20) // lines)  # c * whole >> 20 is c // lines; assemblers use a slow division even for constants
    body = [".reg .pred p; .reg .b32 t, c, d, o, a, b;", "mov.u32 t, %tid.x;"]
    outbox = BARRIER_BYTES + box_bytes(heads, block_dv, cluster)
    rounds = range(-(-total // threads))
    for i in rounds:
        body += [f".reg .b32 x{i}_<4>;", f"add.u32 c, t, {i * threads};", f"setp.lt.u32 p, c, {total};"]
        body += [f"mad.lo.u32 a, c, 16, $1; @p ld.shared.v4.b32 {{x{i}_0, x{i}_1, x{i}_2, x{i}_3}}, [a + {outbox}];"]
    body += [f"mad.lo.u32 o, $2, {lines * 16}, $1;"]
    for i in rounds:
        body += [
            f"add.u32 c, t, {i * threads};",
            f"setp.lt.u32 p, c, {total};",
            f"mul.lo.u32 d, c, {whole}; shr.u32 d, d, 20;",
        ]
        body += [f"mul.lo.u32 a, d, {lines}; sub.u32 c, c, a; mad.lo.u32 a, c, 16, o; add.u32 a, a, {BARRIER_BYTES};"]
        body += ["mapa.shared::cluster.u32 a, a, d; mapa.shared::cluster.u32 b, $1, d;"]
        body += [
            "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
            f"[a], {{x{i}_0, x{i}_1, x{i}_2, x{i}_3}}, [b];"
        ]
    return "{ " + " ".join(body) + " mov.u32 $0, 0; }"


@triton.jit
def open_inbox(CLUSTER: tl.constexpr, MINE: tl.constexpr, BLOCK_DV: tl.constexpr, SHARED: tl.constexpr):
    """Address of a program's inbox in its shared memory, int32. The outbox lies behind the inbox.

    No program may send before :func:`exchange`. SHARED: bytes of both boxes, see ``sizes.exchange_bytes``; Triton's own
    shared memory begins after them.
    """
    BOX: tl.constexpr = CLUSTER * MINE * (BLOCK_DV + 4) * 4
    return tl.inline_asm_elementwise(
        f"{{ .shared .align 16 .b8 inbox[{SHARED}]; .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; "
        "setp.eq.u32 p, t, 0; mov.u32 $0, inbox; "
        "@p mbarrier.init.shared::cta.b64 [$0], 1; @p fence.mbarrier_init.release.cluster; "
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {BOX}; "
        "barrier.cluster.arrive.relaxed.aligned; }",
        "=r",
        [],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _put(address, x, mask):
    """Write fp32 ``x`` to ``address`` of the program's shared memory where ``mask`` is true."""
    mask, address = tl.broadcast(mask, address)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,f,r",
        [address, x, mask.to(tl.int32)],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _get(address):
    """Read fp32 from ``address`` of the program's shared memory."""
    return tl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], tl.float32, False, 1)


@triton.jit
def exchange(
    inbox, program, m, l, acc, g, mask,
    HEADS: tl.constexpr, CLUSTER: tl.constexpr, MINE: tl.constexpr, SENDING: tl.constexpr,
):  # fmt: skip
    """Send maximum, sum ``[BLOCK_G]`` and accumulator ``[BLOCK_G, BLOCK_DV]`` of heads ``g`` to their programs.

    When this returns, the parts that :func:`merge_inbox` reads have arrived. mask ``[BLOCK_G]``: which heads exist.
    """
    LINE: tl.constexpr = acc.shape[1] + 4
    BOX: tl.constexpr = CLUSTER * MINE * LINE * 4
    OWNERS: tl.constexpr = HEADS if HEADS < CLUSTER else CLUSTER  # programs that merge a head
    at = inbox + HEADER + BOX + (g % CLUSTER * MINE + g // CLUSTER) * LINE * 4
    _put(at[:, None] + tl.arange(0, acc.shape[1])[None, :] * 4, acc, mask[:, None])
    _put(at + acc.shape[1] * 4, m, mask)
    _put(at + acc.shape[1] * 4 + 4, l, mask)
    tl.debug_barrier()
    # Wait until all programs of the cluster run.
    tl.inline_asm_elementwise("barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
    tl.inline_asm_elementwise(SENDING, "=r,r,r", [inbox, program], tl.int32, False, 1)
    tl.inline_asm_elementwise(
        f"{{ .reg .pred p; setp.ge.u32 p, $2, {OWNERS}; @p bra done; "
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], 0; @!p bra again; "
        "done: mov.u32 $0, 0; }",
        "=r,r,r",
        [inbox, program],
        tl.int32,
        False,
        1,
    )


@triton.jit
def merge_inbox(inbox, mask, BLOCK_DV: tl.constexpr, CLUSTER: tl.constexpr, MINE: tl.constexpr):
    """``(O [MINE, BLOCK_DV], LSE [MINE])`` of the parts in the inbox, for heads where ``mask [MINE]`` is true."""
    m = tl.full([MINE], float("-inf"), tl.float32)
    for i in tl.static_range(CLUSTER):
        at = inbox + HEADER + (i * MINE + tl.arange(0, MINE)) * (BLOCK_DV + 4) * 4
        m = tl.maximum(m, tl.where(mask, _get(at + BLOCK_DV * 4), float("-inf")))
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros([MINE], tl.float32)
    acc = tl.zeros([MINE, BLOCK_DV], tl.float32)
    for i in tl.static_range(CLUSTER):
        at = inbox + HEADER + (i * MINE + tl.arange(0, MINE)) * (BLOCK_DV + 4) * 4
        part = tl.where(mask[:, None], _get(at[:, None] + tl.arange(0, BLOCK_DV)[None, :] * 4), 0.0)
        weight = tl.exp2(tl.where(mask, _get(at + BLOCK_DV * 4), float("-inf")) - m_safe)
        l += tl.where(mask, _get(at + BLOCK_DV * 4 + 4), 0.0) * weight
        acc += part * weight[:, None]
    return finish(m, l, acc)
