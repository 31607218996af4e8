"""Attention of steps with prompts by FlashAttention 3, through `torch.nn.attention.varlen`. Only on request:
`PERSONAE_ATTENTION_BACKEND=flash`. Other steps go to Triton's kernels."""

from importlib.util import find_spec
from inspect import signature
from typing import cast

import torch

from personae.kernels import registry
from personae.kernels.registry import Implementation

MODULE = "flash_attn_interface"  # of FlashAttention 3
DTYPES = frozenset({torch.float16, torch.bfloat16})
HOPPER = 9  # FlashAttention 3 runs on no other generation


def unavailable() -> str | None:
    """Why there are no operators on this machine; None if there are."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return "needs a Hopper GPU (compute capability 9.x)"
    if not _reads_pages():
        return (
            "needs a torch whose torch.nn.attention.varlen.varlen_attn_out has a block_table, "
            f"which torch {torch.__version__} lacks"
        )
    if find_spec(MODULE) is None:
        return f"needs FlashAttention 3, whose module {MODULE} is not installed"
    return None


def _reads_pages() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return False
    return "block_table" in signature(varlen_attn_out).parameters


def operators() -> dict[str, Implementation]:
    """The operators of this backend by name; empty where one thing is missing that `unavailable` names."""
    if unavailable():
        return {}
    from personae.kernels.attention_backend import AttentionBackend, ReferenceAttention
    from personae.kernels.flash.attention import FlashAttention

    others = registry.operators("triton").get("paged_attention")
    run = FlashAttention(cast(AttentionBackend, others.run) if others else ReferenceAttention())
    return {"paged_attention": Implementation(run, DTYPES, (HOPPER, 0), on_request=True)}
