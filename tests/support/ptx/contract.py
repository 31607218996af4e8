"""The cases that every kernel has to pass, few and rich: of each kernel all paths, ragged ends, and rows that
other rows must not touch. `make test` runs them, the table of costs and that of mutations are made of them.

Cases of a list have the same machine code where shapes that are compiled in are the same.
"""

from collections.abc import Callable

import torch

from ptx.cases import Case, append, experts, gates, norms, quantized, rotary
from ptx.cases_attention import attention
from ptx.cases_lora import lora
from ptx.cases_sampling import sampling

B, H, F = torch.bfloat16, torch.float16, torch.float32
Maker = Callable[[int], Case]

# Of blocks of 64 keys the last is ragged in each stage of the pipeline.
_DECODE = [(1, 1), (1, 17), (1, 100), (1, 150), (1, 220), (1, 600), (1, 257), (1, 1000)]
_PROMPTS = [(60, 60), (1, 300), (33, 250), (70, 313)]
# Split, and with as many queries as there is room for: a tile has more.
_SPLIT = [(33, 500), (1, 300), (33, 330)]
_CROWD = [*[(1, 1 + row % 19) for row in range(90)], (20, 30)]  # more rows than a warp lists


def _decode(capability: int, processors: int, *, plain: bool, fp8: bool = False) -> Case:
    if plain:
        return attention(
            processors,
            capability,
            dim=128,
            kv_heads=2,
            group=4,
            dtype=B,
            fp8=fp8,
            rows=_DECODE,
            window=None,
            processors=processors,
        )
    return attention(
        processors,
        capability,
        dim=80,
        kv_heads=1,
        group=3,
        dtype=H,
        fp8=fp8,
        rows=_DECODE,
        window=299,
        processors=processors,
    )


def _prefill(capability: int, rows: list[tuple[int, int]], *, plain: bool, window: int = 90) -> Case:
    if plain:
        return attention(
            1,
            capability,
            dim=64,
            kv_heads=2,
            group=4,
            dtype=B,
            fp8=False,
            rows=rows,
            window=None,
            processors=132,
        )
    return attention(
        2,
        capability,
        dim=80,
        kv_heads=1,
        group=3,
        dtype=H,
        fp8=False,
        rows=rows,
        window=window,
        processors=132,
    )


def _adapters(
    capability: int,
    seed: int,
    rows: list[int | None],
    ranks: list[int],
    dtype: torch.dtype,
    beside: bool,
    processors: int,
) -> Case:
    return lora(
        seed,
        capability,
        outputs=(256, 96, 320),
        inputs=1536,
        ranks=ranks,
        adapters=rows,
        dtype=dtype,
        beside=beside,
        processors=processors,
    )


CONTRACT: dict[str, list[Maker]] = {
    "norm": [
        lambda _: norms(0, 1000, B),
        lambda _: norms(5, 1000, B),
        lambda _: norms(1, 576, H),
        lambda _: norms(4, 576, H),
    ],
    "rotary": [
        lambda _: rotary(1, (3, 2, 96)),
        lambda _: rotary(2, (3, 2, 96)),
        lambda _: rotary(3, (2, 3, 128)),
    ],
    "gate": [lambda _: gates(4, 1504, B), lambda _: gates(0, 2832, B), lambda _: gates(1, 1500, H)],
    "append": [
        lambda capability: append(1, capability, (3, 80, 5)),
        lambda capability: append(2, capability, (2, 128, 4)),
    ],
    "experts": [
        lambda _: experts(0, [17, 0, 3, 40], (130, 72), H),
        lambda _: experts(1, [1, 70, 0, 5], (130, 72), H),
        lambda _: experts(2, [100, 0, 190], (96, 256), B),
        lambda _: experts(3, [0, 129, 140], (96, 256), B),
    ],
    "quantized": [
        lambda _: quantized(0, "int8", 5, (33, 200), B),
        lambda _: quantized(1, "int8", 70, (130, 256), B),
        lambda _: quantized(2, "int4", 5, (33, 200), B),
        lambda _: quantized(3, "int4", 70, (130, 256), B),
        lambda _: quantized(4, "int4", 70, (130, 72), H),
    ],
    "blocks": [
        lambda _: quantized(0, "Q8_0", 5, (33, 224), B),
        lambda _: quantized(1, "Q4_0", 70, (130, 160), B),
        lambda _: quantized(2, "Q4_1", 5, (33, 224), H),
        lambda _: quantized(3, "Q4_K", 70, (130, 256), B),
        lambda _: quantized(4, "Q6_K", 5, (33, 512), B),
        lambda _: quantized(5, "Q6_K", 70, (66, 256), H),
    ],
    "decode": [
        lambda capability: _decode(capability, 16, plain=True),
        lambda capability: _decode(capability, 2, plain=True),
    ],
    "decode, window": [
        lambda capability: _decode(capability, 8, plain=False),
        lambda capability: _decode(capability, 1, plain=False),
    ],
    "decode, fp8": [lambda capability: _decode(capability, 16, plain=True, fp8=True)],
    "prefill": [
        lambda capability: _prefill(capability, _PROMPTS, plain=True),
        lambda capability: _prefill(capability, _CROWD, plain=True),
        lambda capability: _prefill(capability, _SPLIT, plain=True),
    ],
    "prefill, window": [
        lambda capability: _prefill(capability, _PROMPTS, plain=False),
        lambda capability: _prefill(capability, _SPLIT, plain=False, window=410),
    ],
    "drafts": [
        lambda capability: attention(
            3,
            capability,
            dim=96,
            kv_heads=2,
            group=4,
            dtype=B,
            fp8=False,
            window=None,
            processors=16,
            rows=[(2, 40), (4, 700), (1, 1), (3, 500)],
        )
    ],
    "adapters, decode": [
        lambda capability, beside=beside, processors=processors: _adapters(
            capability,
            1,
            [0, 1, 1, None, 2, 3, 3, 3, 4, 5, 5, 5, 5, 5, 5],
            [8, 16, 24, 0, 64, 33],
            B,
            beside,
            processors,
        )
        for beside, processors in ((False, 2), (False, 24), (True, 2))
    ],
    "adapters, prompts": [
        lambda capability, dtype=dtype: _adapters(
            capability,
            2,
            [*[0] * 70, None, *[1] * 40, 2, *[3] * 17, *[4] * 3],
            [64, 16, 33, 8, 0],
            dtype,
            False,
            3,
        )
        for dtype in (B, H)
    ],
    "sampling": [
        lambda _: sampling(
            1, vocabulary=5008, voices=(0, 1, 3, 4), masked=(True, False, True, False), crowded=True
        ),
        lambda _: sampling(
            2, vocabulary=5008, voices=(2, 5, 6, 7), masked=(False, True, False, True), crowded=True
        ),
    ],
}
