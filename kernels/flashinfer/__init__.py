"""Sampling whose filters are FlashInfer's kernels. Only on request: `PERSONAE_KERNELS=choose=flashinfer`."""

from importlib.util import find_spec

import torch

from personae.kernels.registry import Implementation

MODULE = "flashinfer"
OLDEST = (8, 0)


def unavailable() -> str | None:
    """Why there are no operators on this machine; None if there are."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "needs a CUDA device"
    if find_spec(MODULE) is None:
        return f"needs FlashInfer, whose module {MODULE} is not installed"
    return None


def operators() -> dict[str, Implementation]:
    """The operators of this backend by name; empty where one thing is missing that `unavailable` names."""
    if unavailable():
        return {}
    from personae.kernels.flashinfer.sampling import choose

    return {"choose": Implementation(choose, frozenset({torch.float32}), OLDEST, on_request=True)}
