"""Choosing one token per row: the arithmetic, on plain tensors.

Every function treats each row separately: a row's result has the same bits whatever the other rows are (on a
CPU, in float32). A vocabulary is long and only a few blocks of it matter. So it is read in blocks of 64: a
few cheap passes find the blocks that matter, and only those are examined.
"""

import numpy as np
import torch
from torch import Tensor

BLOCK = 64
CANDIDATES = 64  # how many of the largest weights are tried before the whole row is sorted


def _blocks(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views of x [R, V]: the whole blocks [R, V // 64, 64], and the rest, [R, V % 64] or None."""
    rows, width = x.shape
    whole = width // BLOCK
    tail = x[:, whole * BLOCK :] if width % BLOCK else None
    return x[:, : whole * BLOCK].view(rows, whole, BLOCK) if whole else x.new_empty(rows, 0, BLOCK), tail


def _block_max(x: Tensor) -> Tensor:
    blocks, tail = _blocks(x)
    most = blocks.amax(2)
    return most if tail is None else torch.cat((most, tail.amax(1, keepdim=True)), 1)


def _block_sum(x: Tensor) -> Tensor:
    blocks, tail = _blocks(x)
    sums = blocks.sum(2)
    return sums if tail is None else torch.cat((sums, tail.sum(1, keepdim=True)), 1)


def _look(x: Tensor, blocks: Tensor, beyond: float) -> tuple[Tensor, Tensor]:
    """The elements of x [R, V] in `blocks` [R, N] and their ids, both [R, N * 64]. Past the end: `beyond`."""
    width = x.shape[1]
    within = torch.arange(BLOCK, device=x.device)
    ids = (blocks[:, :, None] * BLOCK + within).flatten(1)
    if width % BLOCK == 0:
        return x.gather(1, ids), ids
    return x.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, beyond), ids


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum [R] and its id [R] int64. The lowest id wins a tie.

    A row with a NaN has the maximum NaN.
    """
    block = _block_max(logits).argmax(1, keepdim=True)
    values, ids = _look(logits, block, -torch.inf)
    place = values.argmax(1, keepdim=True)
    return values.gather(1, place).squeeze(1), ids.gather(1, place).squeeze(1)


def _order(values: Tensor, ids: Tensor) -> Tensor:
    """An int64 for each pair, larger for a larger float32 value and, for equal values, for a lower id."""
    bits = (values + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, which is equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - ids)


def _top_blocks(x: Tensor, count: int) -> Tensor:
    """The `count` blocks [R, count] with the largest maxima. They contain the `count` largest elements.

    (An element outside them has at least `count` block maxima before it.)
    """
    most = _block_max(x)
    keys = _order(most, torch.arange(most.shape[1], device=x.device))
    return keys.topk(min(count, most.shape[1]), 1, sorted=False).indices


def top(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the `count` largest elements of each row of x [R, V] float32.

    The largest come first, and for equal values the lower id.
    """
    values, ids = _look(x, _top_blocks(x, count), -torch.inf)
    best = _order(values, ids).topk(count, 1).indices
    return values.gather(1, best), ids.gather(1, best)


def thresholds(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight that top_k and top_p let each row keep: [R] float32.

    weights: [R, V] float32, not negative, in any scale. top_k: [R] int64, 0 = off. top_p: [R] float64,
    infinity = off. With the weights w_1 >= w_2 >= … of a row, top_k keeps w >= w_k. top_p keeps w >= w_j,
    where j is the first with w_1 + … + w_j >= top_p * (w_1 + … + w_k). Tokens that tie with the last kept one
    are kept too.
    """
    total = _block_sum(weights).sum(1, dtype=torch.float64)
    if weights.device.type != "cpu":  # checking whether the candidates suffice would wait for the device
        return _thresholds(weights.sort(1, descending=True).values, top_k, top_p, total)[0]
    if weights.shape[1] <= CANDIDATES:
        return _thresholds(_sorted(weights), top_k, top_p, total)[0]
    few = _sorted(_look(weights, _top_blocks(weights, CANDIDATES), 0.0)[0])[:, :CANDIDATES]
    kept, enough = _thresholds(few, top_k, top_p, total)
    rest = (~enough).nonzero().squeeze(1)
    if len(rest):
        ordered = _sorted(weights if len(rest) == len(weights) else weights[rest])
        kept[rest] = _thresholds(ordered, top_k[rest], top_p[rest], total[rest])[0]
    return kept


def _sorted(weights: Tensor) -> Tensor:
    """Each row of a CPU tensor, largest first. NumPy sorts plain numbers ten times faster than torch."""
    return torch.from_numpy(np.sort(weights.numpy(), axis=1)).flip(1)


def _thresholds(ordered: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """`thresholds` from the largest weights [R, K], and whether these were enough to decide, [R] bool."""
    width = ordered.shape[1]
    edges = _edges(ordered)
    limited = top_k > 0
    last = (top_k - 1).clamp(0, width - 1)[:, None]
    floor = torch.where(limited, ordered.gather(1, last).squeeze(1), 0.0)
    total = torch.where(limited, _sum_to(ordered, edges, last).squeeze(1), total)
    first = _search(ordered, edges, (top_p * total)[:, None], right=False)
    nucleus = ordered.gather(1, first.clamp(max=width - 1)).squeeze(1)
    found = first.squeeze(1) < width
    kept = torch.where(found, torch.maximum(floor, nucleus), floor)
    return kept, torch.where(limited, top_k <= width, found)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling in vocabulary order: ids [R] int64.

    weights: [R, V] float32, not negative, in any scale. uniforms: [R] float64 in [0, 1).
    id = the first t with  w_0 + … + w_t > u * (w_0 + … + w_{V-1}).  A token of weight zero is never drawn.
    """
    edges = _edges(weights)
    ids = _search(weights, edges, uniforms[:, None] * edges[:, -1:], right=True)
    return ids.squeeze(1).clamp_(max=weights.shape[1] - 1)  # a row of NaN still gets an id in range


def _edges(x: Tensor) -> Tensor:
    """The running sum of x [R, V] at the end of each block, [R, ceil(V / 64)] float64."""
    return _block_sum(x).cumsum(1, dtype=torch.float64)


def _before(edges: Tensor, block: Tensor) -> Tensor:
    return torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0)), 0.0)


def _sum_to(x: Tensor, edges: Tensor, last: Tensor) -> Tensor:
    """x_0 + … + x_last of each row; last: [R, 1]."""
    block = last // BLOCK
    inside = _look(x, block, 0.0)[0].cumsum(1, dtype=torch.float64)
    return _before(edges, block) + inside.gather(1, last % BLOCK)


def _search(x: Tensor, edges: Tensor, target: Tensor, *, right: bool) -> Tensor:
    """Where the running sum of x first reaches (`right`: exceeds) target [R, 1]; V or more if nowhere."""
    block = torch.searchsorted(edges, target, right=right)
    at = block.clamp(max=edges.shape[1] - 1)
    inside = _look(x, at, 0.0)[0].cumsum(1, dtype=torch.float64)
    # A block's sum and its running sum differ in their last bits, but the target must be found in the block.
    end = inside[:, -1:]
    target = torch.minimum(target - _before(edges, at), torch.nextafter(end, end * 0) if right else end)
    place = torch.searchsorted(inside, target, right=right)
    return torch.where(block < edges.shape[1], at * BLOCK + place, x.shape[1])
