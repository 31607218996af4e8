"""What is measured: the shape of Llama 3.1 8B, and batches of rows with adapters of every popularity."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.counter_rng import stream
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList
from personae.kernels.upload import uploads

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, PAGE = 4096, 14336, 32, 8, 128, 32, 16
KV = KV_HEADS * DIM
VOCAB = 128256
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
WEIGHT_BYTES = 2 * sum(inputs * sum(outputs) for inputs, outputs in GROUPS.values())  # per layer
RANK_BYTES = 2 * sum(inputs * len(outputs) + sum(outputs) for inputs, outputs in GROUPS.values())


@dataclass(frozen=True, slots=True)
class Mix:
    """A batch of one-token rows: each row's adapter (None is the base model), and all adapters' ranks."""

    name: str
    rows: tuple[int | None, ...]
    ranks: tuple[int, ...]

    @property
    def lora_bytes(self) -> int:
        """The fewest bytes of adapters that one layer must read."""
        return RANK_BYTES * sum(self.ranks[adapter] for adapter in {a for a in self.rows if a is not None})


def mixes(batch: int, seed: int) -> list[Mix]:
    """The batches of the table, rows sorted by adapter."""
    zipf = random.Random(seed).choices(range(1000), [1 / (i + 1) for i in range(1000)], k=batch)
    distinct = {adapter: slot for slot, adapter in enumerate(sorted(set(zipf)))}
    cycle = (8, 16, 32, 64)
    found = [
        Mix("one adapter, r16", (0,) * batch, (16,)),
        Mix("one adapter, r64", (0,) * batch, (64,)),
    ]
    if batch > 1:
        found += [
            Mix("all different, r16", tuple(range(batch)), (16,) * batch),
            Mix("all different, r64", tuple(range(batch)), (64,) * batch),
            Mix("all different, r8 to r64", tuple(range(batch)), tuple(cycle[i % 4] for i in range(batch))),
            Mix(
                f"Zipf over 1000 ({len(distinct)} met), r16",
                tuple(sorted(distinct[adapter] for adapter in zipf)),
                (16,) * len(distinct),
            ),
        ]
    return found


def work_list(rows: tuple[int | None, ...], capacity: int, device: torch.device) -> WorkList:
    """The rows' segments, padded with empty ones to `capacity`, as in a captured graph."""
    segments: list[tuple[int, int, int]] = []
    for row, adapter in enumerate(rows):
        if adapter is None:
            continue
        if segments and segments[-1][2] == adapter and sum(segments[-1][:2]) == row:
            segments[-1] = (segments[-1][0], segments[-1][1] + 1, adapter)
        else:
            segments.append((row, 1, adapter))
    segments += [(0, 0, 0)] * (capacity - len(segments))
    first_row, count, whose = uploads(tuple(np.array(segments, np.int32).reshape(-1, 3).T), device)
    return WorkList(first_row, count, whose)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The weight pools of each group, one tuple per layer, and the rank tables that all layers share."""

    weight_pools: dict[str, list[tuple[WeightPool, ...]]]
    tables: dict[str, tuple[RankTable, ...]]


def make_adapters(
    ranks: tuple[int, ...],
    layers: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    groups: dict[str, tuple[int, tuple[int, ...]]] = GROUPS,
) -> Adapters:
    """Adapters of these ranks in random pages. All other rows of the weight pools are NaN."""
    device = generator.device
    counts = [-(-rank // RANK_PAGE) for rank in ranks]
    spare = sum(counts) + 1
    weight_pools: dict[str, list[tuple[WeightPool, ...]]] = {}
    tables: dict[str, tuple[RankTable, ...]] = {}
    for group, (inputs, outputs) in groups.items():
        of_group = []
        live = []
        for _ in outputs:
            order = torch.randperm(spare, generator=generator, device=device).int()
            pages = torch.zeros(len(ranks), max(counts), dtype=torch.int32, device=device)
            taken = 0
            rows = []
            for slot, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
                pages[slot, :count] = order[taken : taken + count]
                own = pages[slot, :count].long()[:, None] * RANK_PAGE + torch.arange(RANK_PAGE, device=device)
                rows.append(own.flatten()[:rank])
                taken += count
            live.append(torch.cat(rows))
            of_group.append(RankTable(torch.tensor(ranks, dtype=torch.int32, device=device), pages))
        tables[group] = tuple(of_group)
        weight_pools[group] = [
            tuple(
                WeightPool(
                    _poisoned(rows, spare * RANK_PAGE, inputs, inputs**-0.5, dtype, generator),
                    _poisoned(rows, spare * RANK_PAGE, out, 0.25, dtype, generator),
                )
                for rows, out in zip(live, outputs, strict=True)
            )
            for _ in range(layers)
        ]
    return Adapters(weight_pools, tables)


def _poisoned(
    rows: Tensor, height: int, width: int, scale: float, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    matrix = torch.full((height, width), torch.nan, dtype=dtype, device=rows.device)
    matrix[rows] = noise((len(rows), width), dtype, generator) * scale
    return matrix


def noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal noise on the generator's device."""
    return torch.randn(shape, dtype=dtype, generator=generator, device=generator.device)


def attention_batch(
    rows: list[tuple[int, int]], device: torch.device, seed: int
) -> tuple[AttentionBatch, int]:
    """The batch of rows (queries, keys) on shuffled pages, and how many pages there must be."""
    logit_mask = [-(-keys // PAGE) for _, keys in rows]
    num_pages = sum(logit_mask) + 1
    order = random.Random(seed).sample(range(num_pages), num_pages)
    table = torch.full((len(rows), max(logit_mask)), order.pop(), dtype=torch.int32)
    write = []
    for row, ((queries, keys), count) in enumerate(zip(rows, logit_mask, strict=True)):
        own = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        table[row, :count] = own
        position = torch.arange(keys - queries, keys)
        write.append(own[position // PAGE].long() * PAGE + position % PAGE)
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0)
    batch = AttentionBatch(
        query_start=starts.int().to(device),
        kv_length=torch.tensor([keys for _, keys in rows], dtype=torch.int32, device=device),
        page_table=table.to(device),
        write_index=torch.cat(write).to(device),
        max_query=max(queries for queries, _ in rows),
        max_kv=max(keys for _, keys in rows),
    )
    return batch, num_pages


def sampling_rows(count: int, seed: int, filtered: bool = True) -> SamplingRows:
    """Rows that draw, except one in eight. `filtered`: with top_k, top_p, min_p or several of them."""
    each = np.arange(count)
    on = each % 8 if filtered else np.zeros(count, np.int64)
    return SamplingRows(
        temperature=np.where(each % 8 == 7, 0, 0.8).astype(np.float32),
        top_k=np.where(np.isin(on, (1, 4, 5)), 20, 0),
        top_p=np.where(np.isin(on, (2, 4, 6)), 0.9, np.inf),
        min_p=np.where(np.isin(on, (3, 5, 6)), 0.05, 0).astype(np.float32),
        streams=np.array([stream(seed + row) for row in range(count)]),
        positions=each + 100,
    )
