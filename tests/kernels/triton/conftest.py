"""These tests run in the interpreter, which Triton must be told before it is imported.

So they have a process of their own: `tests/kernels/test_triton.py` starts it, and so can you:
`TRITON_INTERPRET=1 pytest tests/kernels/triton`. In any other process they are not collected.
"""

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What torch.empty returns is NaN, so that whatever a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
