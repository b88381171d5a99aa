"""What programs of a cluster send each other. Only such a GPU runs it; where it goes is worked out here."""

import re

import pytest
import torch

from nsa.kernels.query_major import tiles
from nsa.kernels.shared import clusters, sizes

SHAPES = [
    (heads, block_dv, cluster, threads)
    for heads in (1, 4, 8, 12, 16, 64)
    for block_dv in (16, 64, 128, 256)
    for cluster in (2, 3, 4, 8, 16)
    for threads in (32, 128)
    if sizes.exchange_bytes(heads, block_dv, cluster) <= tiles.EXCHANGE_BYTES
]
INBOX = 1024


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_line_arrives_where_it_is_merged(shape):
    heads, block_dv, cluster, threads = shape
    box = sizes.box_bytes(heads, block_dv, cluster)
    per_program = box // cluster
    sent = set()
    statements = _parsed(clusters.sending(*shape))
    for program in (0, cluster - 1):
        for receiver, to, from_ in _lines(statements, INBOX, program, threads):
            line = from_ - INBOX - sizes.BARRIER_BYTES - box  # where in the outbox, which is laid out by receiver
            assert receiver == line // per_program, "a line of another program's heads"
            assert to == INBOX + sizes.BARRIER_BYTES + program * per_program + line % per_program
            assert (program, line) not in sent, "sent twice: more bytes arrive than are waited for"
            sent.add((program, line))
    owners = min(heads, cluster)
    assert len(sent) == 2 * owners * per_program // 16, "fewer bytes arrive than are waited for"


def _parsed(assembly):
    """``(guarded, operation, operands, names, addresses)`` of each statement. The last two are of loads and stores."""
    found = (re.fullmatch(r"\s*(@p )?(\S+) (.*?)\s*", text) for text in assembly.strip("{ }").split(";"))
    statements = []
    for guarded, operation, operands in (x.groups() for x in found if x and x[2] != ".reg"):
        names, at = None, []
        if operation.startswith(("ld.", "st.")):
            names = re.search(r"\{(.*?)\}", operands)[1]
            at = [part.split(" + ") for part in re.findall(r"\[(.*?)\]", operands)]
        statements.append((guarded, operation, [x.strip() for x in operands.split(",")], names, at))
    return statements


def _lines(statements, inbox, program, threads):
    """``(receiver, address there, address here)`` of each 16 bytes that a thread sends. Registers hold all threads'."""
    registers, loaded, mapped = {}, {}, {}

    def value(operand):
        return registers[operand] if operand in registers else torch.full((threads,), int(operand))

    registers |= {"$1": value(inbox), "$2": value(program), "%tid.x": torch.arange(threads)}
    for guarded, operation, (to, *rest), names, at in statements:
        assert names is not None or not guarded, "expected guards of loads and stores only"
        if names is not None:
            if operation.startswith("ld."):
                loaded[names] = value(at[0][0]) + int(at[0][1])
            else:
                (receiver, address), (waiting, barrier) = mapped[at[0][0]], mapped[at[1][0]]
                assert torch.equal(waiting, receiver), "the bytes count for who gets them"
                assert (barrier == inbox).all()
                on = registers["p"] if guarded else slice(None)
                yield from zip(*(x[on].tolist() for x in (receiver, address, loaded[names])), strict=True)
            continue
        kind = operation.split(".")[0]
        if kind == "mapa":
            mapped[to] = value(rest[1]), value(rest[0])
            continue
        x = [value(operand) for operand in rest]
        registers[to] = {
            "mov": lambda x: x[0],
            "add": lambda x: x[0] + x[1],
            "sub": lambda x: x[0] - x[1],
            "mul": lambda x: x[0] * x[1],
            "mad": lambda x: x[0] * x[1] + x[2],
            "shr": lambda x: x[0] >> x[1],
            "setp": lambda x: x[0] < x[1],
        }[kind](x)
        assert ((0 <= registers[to]) & (registers[to] < 2**32)).all()


@pytest.mark.parametrize("heads", [33, 64])
@pytest.mark.parametrize("cluster", [2, 3, 8, 16])
def test_tiles_of_64_rows_begin_where_a_pattern_does(heads, cluster):
    assert sizes.exchange_bytes(heads, 32, cluster) % sizes.PATTERN_BYTES == 0
    assert sizes.exchange_bytes(32, 32, cluster) == sizes.BARRIER_BYTES + 2 * sizes.box_bytes(32, 32, cluster)


@pytest.mark.parametrize(("heads", "cluster", "fits"), [(16, 16, True), (16, 3, False), (64, 8, False)])
def test_programs_that_cannot_hold_what_they_are_sent_are_no_cluster(heads, cluster, fits):
    choice = tiles.Choice(cluster, 1, 64, 4, 1, 1)
    tile, splits, merged = tiles.tile_and_splits(
        None, 90, 132, 2, heads, 256, 256, 1024, 16, 4, choice=choice, largest=16
    )  # fmt: skip
    assert splits == cluster
    assert merged == fits
    assert not merged or sizes.exchange_bytes(tile.HEADS, tile.BLOCK_DV, splits) <= tiles.EXCHANGE_BYTES
