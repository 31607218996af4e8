"""Products with weights of four bits by torch's own kernel, tinygemm. Weights that it does not take go to
Triton's kernels, as all do with `PERSONAE_KERNELS=pack_linear=triton`."""

from functools import partial

import torch

from personae.kernels import registry
from personae.kernels.registry import Implementation

OLDEST = (8, 0)


def unavailable() -> str | None:
    """Why there are no operators on this machine; None if there are."""
    if "pack_linear" not in registry.operators("triton"):
        return "needs Triton's kernels for the weights that it does not take"
    return None


def operators() -> dict[str, Implementation]:
    """The operators of this backend by name; empty where one thing is missing that `unavailable` names."""
    if unavailable():
        return {}
    from personae.kernels.tinygemm.linear import pack_linear

    others = registry.operators("triton")["pack_linear"].run
    return {
        "pack_linear": Implementation(
            partial(pack_linear, others=others), frozenset({torch.bfloat16}), OLDEST
        )
    }
