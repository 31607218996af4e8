"""SGMV's kernels in torch, computed only from the arguments of their launch; see
`kernels/triton/device/sgmv_plan.py`."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

PAGE = 8


def _per_module(a: SimpleNamespace, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(a, name.format(m)) for name in names) for m in range(a.MODULES)]


def plan(a: SimpleNamespace) -> None:
    """Counts of items, ranks and pages of every segment."""
    before = [0, 0]
    for segment, (rows, slot) in enumerate(zip(a.rows_ptr.tolist(), a.adapter_ptr.tolist(), strict=True)):
        listed, blocks = [], 0
        for m, (rank_of, pages_of, wide) in enumerate(
            _per_module(a, "rank{}_ptr", "pages{}_ptr", "blocks{}")
        ):
            rank = int(rank_of[slot])
            a.ranks_ptr[segment, m] = rank
            listed += pages_of[slot, : -(-rank // PAGE)].tolist()
            blocks += wide if rank else 0
        a.pages_ptr[segment, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        tiles = -(-rows // a.ROWS)
        before[0] += tiles * -(-len(listed) * PAGE // a.RANKS) * a.SPLITS
        before[1] += tiles * blocks
        a.ends_ptr[:, segment] = torch.tensor(before, dtype=torch.int32)


def _segments(a: SimpleNamespace, kind: int) -> Iterator[tuple[slice, list[tuple[int, slice, Tensor]]]]:
    """For each segment with items: its rows, and its modules with a rank: number, columns, pool rows."""
    ends = [0, *a.ends_ptr[kind].tolist()]
    for segment, (before, end) in enumerate(pairwise(ends)):
        if end <= before:
            continue
        first, rows = int(a.first_ptr[segment]), int(a.rows_ptr[segment])
        modules, page = [], 0
        for m in range(a.MODULES):
            rank = int(a.ranks_ptr[segment, m])
            count = -(-rank // PAGE)
            own = a.pages_ptr[segment, page : page + count].long()
            places = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:rank]
            modules += [(m, slice(page * PAGE, page * PAGE + rank), places)] if rank else []
            page += count
        yield slice(first, first + rows), modules


def shrink(a: SimpleNamespace) -> None:
    """Each split's sums."""
    x = a.x_ptr.as_strided((a.tokens, a.inputs), (a.x_stride, 1))
    for rows, modules in _segments(a, 0):
        for m, columns, places in modules:
            weight = getattr(a, f"a{m}_ptr")[places]
            for split in range(a.SPLITS):
                part = slice(split * a.split_k, (split + 1) * a.split_k)
                a.planes_ptr[split, rows, columns] = x[rows, part].float() @ weight[:, part].float().T


def expand(a: SimpleNamespace) -> None:
    """The product of shrink's sums with B, added to ys."""
    for rows, modules in _segments(a, 1):
        for m, columns, places in modules:
            y, weight, stride, out = _per_module(a, "y{}_ptr", "b{}_ptr", "y{}_stride", "out{}")[m]
            target = y.as_strided((a.tokens, out), (stride, 1))[rows]
            shrunk = a.planes_ptr[:, rows, columns].sum(0)
            target.copy_((target.float() + shrunk @ weight[places].float()).to(target.dtype))


KERNELS = {"plan_kernel": plan, "shrink_kernel": shrink, "expand_kernel": expand}
