"""What tests of packed sequences and of packed rows share."""

import pytest
import torch


@pytest.fixture
def cu(device):
    """`cu(0, 3, 7)`: cumulative lengths on the device."""

    def make(*ends, dtype=torch.int32):
        return torch.tensor(ends, dtype=dtype, device=device)

    return make
