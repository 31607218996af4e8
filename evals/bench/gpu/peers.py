"""The same work with vLLM's Triton kernels, if vLLM is installed; otherwise, or if they fail, the reason.

The interfaces are those of vLLM 0.33: `lora_shrink`, `lora_expand`, `LoRAKernelMeta`, `unified_attention`.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from personae.evals.bench.gpu.shapes import DIM, GROUPS, Mix, noise
from personae.evals.bench.gpu.timing import replay_time
from personae.kernels.attention import AttentionBatch

ABSENT = "not installed"
Measured = float | str


def attempt(package: str, measure: Callable[[], float]) -> Measured:
    """What `measure` returns, or why it failed: a peer's failure is not ours."""
    if find_spec(package) is None:
        return ABSENT
    try:
        return measure()
    except Exception as error:
        torch.cuda.synchronize()
        return f"failed: {type(error).__name__}: {error}"[:120]


def vllm_lora(
    mix: Mix, copies: int, x: dict[str, Tensor], ys: dict[str, Tensor], generator: torch.Generator
) -> Measured:
    """Microseconds for the four groups of a layer. Adapters are padded to the largest rank, as vLLM keeps
    them.

    x: [B, in] and ys: [B, sum of out], by group.
    """

    def measure() -> float:
        ops: Any = import_module("vllm.lora.ops.triton_ops")
        batch, device, rank, count = len(mix.rows), generator.device, max(mix.ranks), len(mix.ranks)
        meta = ops.LoRAKernelMeta.make(count, batch, device)
        meta.prepare_tensors(torch.tensor([-1 if a is None else a for a in mix.rows], device=device).int())
        arguments = meta.meta_args(batch, False)
        bf16 = torch.bfloat16
        layers = [
            {
                group: (
                    [noise((count, rank, inputs), bf16, generator) for _ in outputs],
                    [noise((count, out, rank), bf16, generator) for out in outputs],
                )
                for group, (inputs, outputs) in GROUPS.items()
            }
            for _ in range(copies)
        ]

        def run(layer: dict[str, tuple[list[Tensor], list[Tensor]]]) -> None:
            for group, (a, b) in layer.items():
                shrunk = torch.empty(len(a), batch, rank, dtype=torch.float32, device=device)
                ops.lora_shrink(x[group], a, shrunk, *arguments, 1.0)
                ops.lora_expand(shrunk, b, ys[group], *arguments, offset_start=0, add_inputs=True)

        return replay_time([partial(run, layer) for layer in layers])

    return attempt("vllm", measure)


def vllm_attention(q: Tensor, caches: list[Tensor], batch: AttentionBatch) -> Measured:
    """Microseconds of vLLM's unified attention over the same pages."""

    def measure() -> float:
        module: Any = import_module("vllm.v1.attention.ops.triton_unified_attention")
        out = torch.empty_like(q)

        def run(cache: Tensor) -> None:
            module.unified_attention(
                q=q,
                k=cache[0].transpose(1, 2),
                v=cache[1].transpose(1, 2),
                out=out,
                cu_seqlens_q=batch.query_start,
                max_seqlen_q=batch.max_query,
                seqused_k=batch.kv_length,
                max_seqlen_k=batch.max_kv,
                softmax_scale=DIM**-0.5,
                causal=True,
                window_size=(-1, -1),
                block_table=batch.page_table,
                softcap=0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
            )

        return replay_time([partial(run, cache) for cache in caches])

    return attempt("vllm", measure)
