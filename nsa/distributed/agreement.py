"""What the ranks of a call tell each other before their first collective: their shards, or an error.

A rank that raises alone would leave the others waiting in a collective. So each rank posts a message in the store of
its process group, and reads those of the others. The host waits, the GPU does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_turns: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How many messages this rank has posted in each group."""


def group_of(mesh: Any) -> ProcessGroup:
    """The process group of one dimension of a mesh, or ``mesh`` itself if it is a group.

    Raises:
        TypeError: ``mesh`` is neither.
        ValueError: the mesh has several dimensions, or this rank is not in the group.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = ", ".join(mesh.mesh_dim_names or ()) or "without names"
            raise ValueError(f"mesh: expected one dimension, as mesh['cp'], got {mesh.ndim} dimensions ({names})")
        return mesh.get_group()
    if not isinstance(mesh, ProcessGroup):
        if mesh is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("mesh: expected a group that has this rank, got one that does not")
        raise TypeError(f"mesh: expected a dimension of a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    return mesh


def exchange(group: ProcessGroup, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of all ranks, by rank. A message is JSON.

    Raises:
        RuntimeError: another rank raised, or posted nothing within the group's time-out. The text names it.
    """
    store, rank, ranks = dist.distributed_c10d._get_process_group_store(group), group.rank(), group.size()
    turn = _turns.get(group, 0)
    _turns[group] = turn + 1
    store.set(_key(turn, rank), json.dumps(message))
    keys = [_key(turn, other) for other in range(ranks)]
    limit = _timeout(group)
    try:
        store.wait(keys, limit)
    except RuntimeError as error:  # the class depends on the version
        silent = [other for other, key in enumerate(keys) if not store.check([key])]
        if not silent:
            raise
        raise RuntimeError(
            f"selection_attention: expected all ranks to make the call within {limit.total_seconds():.0f} s, "
            f"got nothing from rank {', '.join(map(str, silent))}"
        ) from error
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    posted = store.multi_get(keys) if at_once else [store.get(key) for key in keys]
    messages = [json.loads(text) for text in posted]
    if turn:  # all ranks have made this call, so all have read the messages before it
        store.delete_key(_key(turn - 1, rank))
    for other, message in enumerate(messages):
        if "error" in message:
            raise RuntimeError(f"selection_attention: rank {other} raised {message['error']}")
    return messages


def post(group: ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks, at this call or at their next, that this rank raises ``error``. Does not wait."""
    turn = _turns.get(group, 0)
    _turns[group] = turn + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(_key(turn, group.rank()), json.dumps({"error": f"{type(error).__name__}: {error}"}))


def compare(messages: list[dict[str, Any]]) -> None:
    """Check that all ranks agree with rank 0 in what ``same`` holds.

    Raises:
        ValueError: on every rank alike. The text names the first difference.
    """
    first = messages[0]["same"]
    for rank, message in enumerate(messages):
        for name, got in message["same"].items():
            if got != first[name]:
                expected = f"{first[name]} on every rank (that of rank 0)"
                raise ValueError(f"{name}: expected {expected}, got {got} on rank {rank}")


def _key(turn: int, rank: int) -> str:
    return f"nsa.distributed/{turn}/{rank}"


def _timeout(group: ProcessGroup) -> timedelta:
    """How long a collective of the group waits."""
    for kind in ("cuda", "cpu"):
        try:
            limit = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for the device, or one without options
            continue
        assert isinstance(limit, timedelta)
        return limit
    return dist.distributed_c10d.default_pg_timeout
