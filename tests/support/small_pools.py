"""Pools of small adapters, and what they must contain."""

from collections.abc import Mapping

import torch
from torch import Tensor

from personae.kernels.memory import Memory
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

SHAPES = LoraShapes(
    2,
    sites(
        {"q": (6, 8), "k": (6, 4), "v": (6, 4), "o": (8, 6), "gate": (6, 10), "up": (6, 10), "down": (10, 6)}
    ),
)
CPU = torch.device("cpu")


def adapter_of(
    seed: int,
    ranks: Mapping[str, int | tuple[int, int]],
    scaling: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """An adapter with random tensors. A rank is the same in both layers or given for each; 0 means a layer
    without the module."""
    random = torch.Generator().manual_seed(seed)
    pairs = {}
    for module, given in ranks.items():
        inputs, outputs = SHAPES.modules[module]
        for layer, rank in enumerate((given, given) if isinstance(given, int) else given):
            if rank:
                a = torch.randn(rank, inputs, generator=random).to(dtype)
                b = torch.randn(rank, outputs, generator=random).to(dtype)
                pairs[layer, module] = LoraPair(a, b, scaling)
    return make_adapter(f"adapter {seed}", pairs)


def make_pool(
    capacity_rows: int = 64,
    max_adapters: int = 4,
    dtype: torch.dtype = torch.float32,
    spare_rows: int = 0,
    memory: Memory | None = None,
) -> LoraPool:
    return LoraPool(
        SHAPES,
        capacity_rows=capacity_rows,
        max_adapters=max_adapters,
        dtype=dtype,
        device=CPU,
        spare_rows=spare_rows,
        memory=memory,
    )


def assert_holds(pool: LoraPool, adapter: Adapter) -> None:
    """Assert that the pools contain the adapter's tensors, through the tables, with the scaling folded into
    B."""
    slot = pool.slot(adapter.digest)
    assert slot is not None
    for group, modules in (("qkv", "q k v"), ("o", "o"), ("gate_up", "gate up"), ("down", "down")):
        for layer in range(SHAPES.layers):
            triples = zip(modules.split(), pool.weight_pools[group][layer], pool.tables[group], strict=True)
            for module, weight_pool, table in triples:
                rows = table.rows(slot)
                assert len(rows) == adapter.ranks.get(module, 0)
                pair = adapter.pairs.get((layer, module))
                rank = pair.rank if pair else 0
                if pair:
                    assert torch.equal(weight_pool.a[rows[:rank]], pair.a.to(pool.dtype))
                    assert torch.equal(
                        weight_pool.b[rows[:rank]], (pair.b.float() * pair.scaling).to(pool.dtype)
                    )
                assert not weight_pool.a[rows[rank:]].any()
                assert not weight_pool.b[rows[rank:]].any()


class Granules:
    """`kernels.memory.Memory` with granules on the CPU, so many of them free. Memory without a granule is
    NaN."""

    lends = True

    def __init__(self, granule: int, free: int) -> None:
        self.granule, self.free = granule, free
        self.backed: set[int] = set()

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = torch.full((size + 2 * self.granule,), 0xFF, dtype=torch.uint8)
        first = -whole.data_ptr() % self.granule
        return whole[first : first + size].view(dtype).view(shape)

    def map(self, part: Tensor) -> None:
        for address in self._granules(part):
            assert address not in self.backed, "it has memory"
            assert self.free, "none is free"
            self.backed.add(address)
            self.free -= 1

    def unmap(self, part: Tensor) -> None:
        for address in self._granules(part):
            self.backed.remove(address)
            self.free += 1
        part.view(torch.uint8).fill_(0xFF)

    def _granules(self, part: Tensor) -> range:
        assert part.data_ptr() % self.granule == 0
        return range(part.data_ptr(), part.data_ptr() + part.nbytes, self.granule)
