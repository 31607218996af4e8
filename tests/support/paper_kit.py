"""The kit for GPUs in small: with these shapes a processor can take the place of the GPU."""

from typing import Any

import pytest
import torch

from personae.evals.bench.gpu import __main__ as bench
from personae.evals.bench.gpu import (
    arriving,
    checks,
    engine,
    few_bits,
    layer,
    lending,
    peers,
    repeats,
    shapes,
    tables,
    timing,
)

MODULES = (arriving, bench, checks, engine, few_bits, layer, lending, peers, repeats, shapes, tables)
TINY: dict[str, Any] = {
    "HIDDEN": 64,
    "INNER": 96,
    "HEADS": 4,
    "KV_HEADS": 2,
    "DIM": 16,
    "KV": 32,
    "VOCAB": 512,
    "GROUPS": {
        "qkv": (64, (64, 32, 32)),
        "o": (64, (64,)),
        "gate_up": (64, (96, 96)),
        "down": (96, (64,)),
    },
    "RANKS": (16, 8, 64, 1) * 4,
    "STEPS": 6,
    "REPEATS": 2,
    "BUSY": 1 << 12,
    "LONG": 64,
    "LAYERS": 6,
    "SHAPE": engine.replace(
        engine.SHAPE,
        vocab_size=512,
        hidden_size=64,
        max_position=64,
        layer_specs=(
            engine.LayerSpec(
                engine.replace(engine.ATTENTION, heads=4, kv_heads=2, head_dim=16), engine.MlpSpec(96)
            ),
        )
        * 2,
    ),
}


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Give the kit these shapes."""
    for module in MODULES:
        for name, value in TINY.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)
    for function, defaults in {
        shapes.make_adapters: (TINY["GROUPS"],),
        checks.sgmv_checks: (64,),
        checks.attention_checks: (64, *checks.attention_checks.__defaults__[1:]),
        checks.expert_checks: (64,),
        few_bits.few_bits_checks: (256,),
        checks.sampling_checks: (512,),
        timing.replay_time: (1,),
        timing.event_time: (1,),
    }.items():
        patch.setattr(function, "__defaults__", defaults)

    patch.setattr(bench, "copy_bandwidth", lambda: 1e6)
    patch.setattr(bench, "product_rate", lambda: 1e8)
    patch.setattr(bench, "LIMITS", (torch.bfloat16,))
    patch.setattr(bench, "served_checks", tuple)  # it takes half a minute, and has a test of its own


def double_events(patch: pytest.MonkeyPatch) -> None:
    """Have modules that were imported before the simulated GPU use its graphs, events and streams."""
    for module in (timing, arriving):
        for name in ("CUDAGraph", "Event", "Stream"):
            if hasattr(module, name):
                patch.setattr(module, name, getattr(torch.cuda, name))
