"""Wrong calls: tensors for tables of them, and the words with which they are refused."""

import pytest
import torch

META = torch.device("meta")


def floats(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def move(x, device):
    """To the device with its strides, which `to` would straighten where they leave gaps."""
    if isinstance(x, tuple):
        return tuple(move(y, device) for y in x)
    if not isinstance(x, torch.Tensor) or x.device == META:
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def wrong(good, *rows):
    """Parameters of a test, `(keywords, …)`, of rows `(changes, …)`: how a good call is changed, and what follows."""
    return [pytest.param(good | changes, *rest, id="-".join(changes)) for changes, *rest in rows]


def refuses(error, text, device, call, **keywords):
    """Exactly these words, and again when the same call comes again. {device} is the device of the good tensors."""
    keywords = {name: move(x, device) for name, x in keywords.items()}
    for _ in range(2):
        with pytest.raises(error) as raised:
            call(**keywords)
        assert str(raised.value) == text.format(device=device)
