"""What lies in a pool's pages does not depend on the form in which the host kept the adapter."""

import pytest
import torch

from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.dora import DoraBias
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites
from personae.lora.stacking import stacked

LAYERS = 5
SHAPES = LoraShapes(
    LAYERS, sites({"q": (48, 32), "down": (9000, 48)})
)  # in one layer a page of down is two copies


def adapter_of(name: str, ranks: dict[tuple[int, str], int], dtype: torch.dtype) -> Adapter:
    generator = torch.Generator().manual_seed(len(name))
    return make_adapter(
        name,
        {
            (layer, module): LoraPair(
                *(torch.randn(rank, w, generator=generator).to(dtype) for w in SHAPES.modules[module]), 0.7
            )
            for (layer, module), rank in ranks.items()
        },
    )


def loaded(adapters: list[Adapter], dtype: torch.dtype) -> LoraPool:
    pool = LoraPool(SHAPES, capacity_rows=120, max_adapters=4, dtype=dtype, device=torch.device("cpu"))
    for stack in pool.stacks.values():
        stack.a.fill_(9)
        stack.b.fill_(9)
    for adapter in adapters:
        pool.load(adapter)
    pool.check_integrity()
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stacked_adapter_is_in_its_pages_bit_for_bit_what_it_is_otherwise(dtype: torch.dtype) -> None:
    everywhere = [(layer, module) for layer in range(LAYERS) for module in SHAPES.modules]
    read = [
        adapter_of("every layer", dict.fromkeys(everywhere, 12), torch.float16),
        adapter_of("patterns", {site: 1 + 7 * i for i, site in enumerate(everywhere)}, torch.bfloat16),
        adapter_of("one layer", {(3, "q"): 8}, torch.float32),
    ]
    ready = [stacked(adapter, LAYERS, dtype) for adapter in read]
    for one, other in zip(read, ready, strict=True):
        assert (other.digest, other.ranks, other.peak) == (one.digest, one.ranks, one.peak)
        assert other.nbytes == sum(half.nbytes for stack in other.stacks.values() for half in stack)
    plain, quick = loaded(read, dtype), loaded(ready, dtype)
    for module, stack in plain.stacks.items():
        other = quick.stacks[module]
        assert torch.equal(stack.table.rank, other.table.rank)
        for slot, rank in enumerate(stack.table.rank.tolist()):
            pages = stack.table.pages[slot, : -(-rank // 8)].long()
            assert torch.equal(pages, other.table.pages[slot, : len(pages)].long())
            rows = (pages[:, None] * 8 + torch.arange(8)).flatten()
            assert torch.equal(stack.a[:, rows], other.a[:, rows])
            assert torch.equal(stack.b[:, rows], other.b[:, rows])
            assert not (stack.a[:, rows] == 9).any()


def test_an_adapter_whose_b_depends_on_the_base_is_kept_as_it_is() -> None:
    plain = adapter_of("dora", {(0, "q"): 4}, torch.float32)
    dora = make_adapter("dora", plain.pairs, dora_bias={(0, "q"): DoraBias(magnitude=torch.ones(32))})
    assert stacked(dora, LAYERS, torch.float32) is dora
