"""Rank pages in groups, [groups, layers, pages, RANK_PAGE, width]; see `pool`."""

from collections.abc import Collection

import torch
from torch import Tensor

from personae.kernels.memory import give_back, give_back_pages
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import LoraShapes


def layers_of(groups: Tensor) -> Tensor:
    """Groups [groups, L, pages, RANK_PAGE, width] as the rows of each layer [L, rows, width]: of layer 0 all
    but the last layers', of layer 1 those from its share of the first group on, and so on."""
    _, layers, pages, _, width = groups.shape
    share = pages * RANK_PAGE
    rows = groups.numel() // width - (layers - 1) * share
    return groups.as_strided((layers, rows, width), (share * width, width, 1))


def give_back_of(group: Tensor, pages: Collection[int]) -> None:
    """Let the system have the memory of these pages of a group [L, pages, RANK_PAGE, width] back."""
    if len(pages) == group.shape[1]:
        give_back(group)
        return
    for share in group:
        give_back_pages(share, pages)


def pool_bytes(shapes: LoraShapes, capacity_rows: int, dtype: torch.dtype) -> int:
    """The bytes of a pool's arenas with this many rank rows a module."""
    widths = sum(inputs + outputs for inputs, outputs in shapes.modules.values())
    return shapes.layers * capacity_rows * widths * dtype.itemsize


def pages_for(rank: int) -> int:
    """How many pages of a module so many ranks take."""
    return -(-rank // RANK_PAGE)
