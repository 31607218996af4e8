"""Cases of our kernels for the interpreter: random shapes, ragged ends, and poison wherever nobody may read.

A case is made from a seed and runs the host function as the server does. What it returns is compared with the
reference; in the memory around, what nobody may read has never been written, and what nobody may write stays.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from quantized_weights import KINDS, weight_of, whole_blocks
from torch import Tensor

from personae.kernels import reference
from personae.kernels.decoder import LinearWeights
from personae.kernels.triton import moe, pointwise
from personae.kernels.triton.quantized import pack_linear
from ptx.launches import unwritten

PAGE = 16
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 3e-6}


@dataclass(frozen=True)
class Check:
    """found and truth differ by less than `tolerance` of the truth, in norm; 0: not by a bit."""

    found: Tensor
    truth: Tensor
    tolerance: float

    def error(self) -> float:
        """The difference in norm, in shares of the truth's; infinity where one is no number."""
        if self.tolerance == 0:
            return float(not torch.equal(self.found, self.truth))
        found, truth = self.found.double(), self.truth.double()
        error = float((found - truth).norm() / truth.norm().clamp_min(1e-30))
        return error if error == error else float("inf")

    def failed(self) -> bool:
        """Whether it does not hold."""
        return not self.error() <= self.tolerance


@dataclass(frozen=True)
class Case:
    """text: what it is. run: computes, within an interpreter, and gives what is to be compared."""

    text: str
    run: Callable[[], list[Check]]


def untouched_outside(whole: Tensor, before: Tensor, own: Tensor) -> Check:
    """That nothing of `whole` was written but where `own` is true."""
    octets = whole.element_size()
    kept = ~own.flatten().repeat_interleave(octets)
    after, old = (x.contiguous().view(torch.uint8).flatten() for x in (whole, before))
    return Check(after[kept], old[kept], 0)


def norms(seed: int, size: int = 0, dtype: torch.dtype | None = None) -> Case:
    """rms_norm with or without a residual, of ragged sizes and strided rows."""
    dice = random.Random(seed)
    rows, sizes, adds = dice.randint(1, 5), dice.choice((40, 96, 576, 1000, 2048, 4096)), dice.random() < 0.6
    dtype = dtype or dice.choice((torch.bfloat16, torch.float16, torch.float32))
    size = size or sizes

    def run() -> list[Check]:
        torch.manual_seed(seed)
        x = unwritten(rows, size + 8, dtype=dtype)[:, :size].copy_(torch.randn(rows, size))
        residual = torch.randn(rows, size).to(dtype) if adds else None
        weight = torch.randn(size)
        found, total = pointwise.rms_norm(x, residual, weight, 1e-5)
        if residual is None:
            return [Check(found, reference.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])]
        truth, kept = reference.add_rms_norm(x, residual, weight, 1e-5)
        return [Check(found, truth, TOLERANCE[dtype]), Check(total, kept, 0)]

    return Case(f"norm {seed}: {rows} x {size}, {dtype}, residual {adds}", run)


def rotary(seed: int, shape: tuple[int, int, int] | None = None) -> Case:
    """Rotary embedding of a part of each head, in place, within a merged tensor. shape: kv heads, query heads
    for each, size of a head."""
    dice = random.Random(seed)
    kv_heads, dim = dice.choice((1, 2, 3)), dice.choice((64, 96, 128))
    group = dice.choice((1, 3, 4))
    kv_heads, group, dim = shape or (kv_heads, group, dim)
    heads, turned = kv_heads * group, dim if dice.random() < 0.7 else dim // 2
    tokens, dtype = dice.randint(1, 4), dice.choice((torch.bfloat16, torch.float16))

    def run() -> list[Check]:
        torch.manual_seed(seed)
        merged = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
        angles, at = torch.randn(100, turned // 2), torch.randint(0, 100, (tokens,))
        results = []
        for turn in (pointwise.rotary, reference.rotary):
            copy = merged.clone()
            q, k, _ = copy.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
            views = q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim)
            turn(*(view[..., :turned] for view in views), at, angles.cos(), angles.sin())
            results.append(copy)
        own = torch.zeros(heads + 2 * kv_heads, dim, dtype=torch.bool)
        own[: heads + kv_heads, :turned] = True
        own = own.flatten().expand(tokens, -1)
        return [Check(*results, TOLERANCE[dtype]), untouched_outside(results[0], merged, own)]

    return Case(f"rotary {seed}: {heads}/{kv_heads} heads, {turned} of {dim}, {dtype}", run)


def gates(seed: int, size: int = 0, dtype: torch.dtype | None = None) -> Case:
    """SiLU and GELU gates."""
    dice = random.Random(seed)
    rows, sizes, gelu = dice.randint(1, 4), dice.choice((40, 1024, 1500, 2816)), dice.random() < 0.5
    dtype = dtype or dice.choice((torch.bfloat16, torch.float16, torch.float32))
    size = size or sizes

    def run() -> list[Check]:
        torch.manual_seed(seed)
        x = unwritten(rows, 2 * size + 16, dtype=dtype)[:, : 2 * size].copy_(torch.randn(rows, 2 * size) * 4)
        truth = (reference.gelu_and_mul if gelu else reference.silu_and_mul)(x.float())
        return [Check(pointwise.act_and_mul(x, gelu=gelu), truth, TOLERANCE[dtype])]

    return Case(f"gate {seed}: {rows} x {size}, {dtype}, gelu {gelu}", run)


def append(seed: int, capability: int, shape: tuple[int, int, int] | None = None) -> Case:
    """Appends to the cache in its dtype, or as E4M3, numbers that it has none for included. shape: heads,
    their size, tokens."""
    dice = random.Random(seed)
    drawn = dice.choice((1, 2, 3)), dice.choice((64, 80, 128)), dice.randint(1, 6)
    heads, dim, tokens = shape or drawn
    dtype = dice.choice((torch.bfloat16, torch.float16))
    kept = reference.FP8 if capability >= 89 and dice.random() < 0.5 else dtype

    def run() -> list[Check]:
        torch.manual_seed(seed)
        merged = unwritten(tokens, 2 * heads * dim + 8, dtype=dtype)
        k, v = (merged[:, m * heads * dim : (m + 1) * heads * dim].view(tokens, heads, dim) for m in (0, 1))
        for part in (k, v):
            part.copy_(torch.randn(part.shape) * 10.0 ** dice.choice((-2, 0, 3)))
        caches = torch.randn(2, 9, heads, PAGE, dim).to(kept)  # what is there has to stay
        truth = caches.clone()
        index = torch.randperm(9 * PAGE)[:tokens]
        pointwise.append_kv(k, v, caches[0], caches[1], index)
        reference.append_kv(k, v, truth[0], truth[1], index)
        return [Check(caches.view(torch.uint8), truth.view(torch.uint8), 0)]

    return Case(f"append {seed}: {tokens} x {heads} heads of {dim}, {dtype} to {kept}", run)


def experts(
    seed: int,
    counts: list[int] | None = None,
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> Case:
    """Products of experts that have any number of rows, none included. shape: outputs and inputs."""
    dice = random.Random(seed)
    drawn = [dice.choice((0, 1, 3, 17, 40)) for _ in range(dice.randint(1, 5))]
    counts = drawn if counts is None else counts
    drawn_shape = dice.choice((48, 64, 130)), dice.choice((32, 72, 256))
    outputs, inputs = shape or drawn_shape
    dtype = dtype or dice.choice((torch.bfloat16, torch.float16))

    def run() -> list[Check]:
        torch.manual_seed(seed)
        x = unwritten(sum(counts), inputs + 16, dtype=dtype)[:, :inputs]
        x.copy_(torch.randn(x.shape))
        weight = (torch.randn(len(counts), outputs, inputs) * inputs**-0.5).to(dtype)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        truth = reference.expert_linear(x.float(), weight.float(), starts)
        return [Check(moe.expert_linear(x, weight, starts), truth, TOLERANCE[dtype])]

    return Case(f"experts {seed}: {counts}, {inputs} to {outputs}, {dtype}", run)


def quantized(
    seed: int,
    kind: str | None = None,
    rows: int | None = None,
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> Case:
    """A product with a weight in few bits. shape: outputs, and inputs at least."""
    dice = random.Random(seed)
    drawn = dice.choice(KINDS), dice.choice((1, 5, 16, 17, 70))
    kind, rows = kind or drawn[0], rows or drawn[1]
    drawn_shape = dice.choice((33, 64, 130)), dice.choice((32, 72, 256))
    outputs, least = shape or drawn_shape
    inputs = whole_blocks(kind, least)
    dtype = dtype or dice.choice((torch.bfloat16, torch.float16))
    has_bias = bool(seed % 2)

    def run() -> list[Check]:
        torch.manual_seed(seed)
        x = unwritten(rows, inputs + 16, dtype=dtype)[:, :inputs]
        x.copy_(torch.randn(x.shape))
        weight = weight_of(kind, outputs, inputs, seed)
        bias = torch.randn(outputs).to(dtype) if has_bias else None
        product = pack_linear(LinearWeights(weight, bias), dtype)
        assert product is not None
        truth = F.linear(x.float(), weight.plain(dtype).float(), None if bias is None else bias.float())
        return [Check(product(x), truth, TOLERANCE[dtype])]

    return Case(
        f"quantized {seed}: {kind}, {rows} rows, {inputs} to {outputs}, {dtype}, bias {has_bias}", run
    )
