"""What the tests of the functions for vLLM have in common."""

import inspect
import re

import pytest
import torch

from nsa.integrations import vllm
from nsa.testing.plugin import current_lane

GPU = current_lane() == "gpu"
DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter computes bf16 wrong
D = 128 if GPU else 16


def close(got, want):
    atol = max(6 * torch.finfo(got.dtype).eps, 1e-5) * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def refuse(name):
    raise AssertionError(f"{name}: expected our kernel, vLLM's own was asked for")


def signature(function):
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]


def refuses_other_axes(name, arguments, argument, axes):
    """Without its first axis, the tensor is named with the axes that it should have."""
    arguments[argument] = given = arguments[argument][0]
    text = f"{argument}: expected {axes}, got {list(given.shape)}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        getattr(vllm, name)(**arguments)
