"""From a step's rows to updates inside the layers: the same as PEFT's, for all adapters in one batch."""

from pathlib import Path

import pytest
import torch
from tiny_adapters import ZOO, lora_shapes, make_adapter, make_zoo, tiny_config

from personae.kernels.sgmv import WorkList
from personae.lora.context import LoraContext
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch, work_list
from personae.lora.sites import PROJECTIONS

CPU = torch.device("cpu")
BASE = tiny_config()
SHAPES = lora_shapes(BASE)


def as_tuples(work: WorkList) -> list[tuple[int, ...]]:
    assert {work.first_row.dtype, work.rows.dtype, work.adapter.dtype} == {torch.int32}
    return list(zip(work.first_row.tolist(), work.rows.tolist(), work.adapter.tolist(), strict=True))


@pytest.mark.parametrize(
    ("slots", "counts", "segments"),
    [
        ([], [], []),
        ([None, None], [3, 1], []),
        ([0, 0, 1], [1, 1, 1], [(0, 2, 0), (2, 1, 1)]),
        ([None, 2, 2, None, 2], [4, 1, 3, 2, 1], [(4, 4, 2), (10, 1, 2)]),
        ([3, None], [7, 1], [(0, 7, 3)]),
    ],
)
def test_neighbouring_rows_of_one_adapter_are_one_segment(
    slots: list[int | None], counts: list[int], segments: list[tuple[int, ...]]
) -> None:
    assert as_tuples(work_list(slots, counts, CPU)) == segments


def test_a_batch_of_all_adapters_and_the_base_gets_the_updates_that_peft_computes(tmp_path: Path) -> None:
    names = list(ZOO)
    adapters = [read_adapter(folder, SHAPES) for folder in make_zoo(tmp_path, BASE).values()]
    models = [make_adapter(BASE, **ZOO[name]) for name in names]
    pool = LoraPool(SHAPES, capacity_rows=192, max_adapters=8, dtype=torch.float32, device=CPU)
    slots: list[int | None] = [pool.load(adapter) for adapter in adapters]
    owners = [None, *range(len(names)), None]
    counts = [2, 1, 3, 1, 5, 1, 2, 1, 4, 1]
    work = work_list([None if owner is None else slots[owner] for owner in owners], counts, CPU)
    per_row = [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]
    batch: LoraContext = LoraBatch(pool, work)
    random = torch.Generator().manual_seed(0)
    for layer in range(SHAPES.layers):
        for group, modules in SHAPES.groups.items():
            x = torch.randn(len(per_row), SHAPES.modules[modules[0]][0], generator=random)
            widths = [SHAPES.modules[module][1] for module in modules]
            base = torch.randn(len(per_row), sum(widths), generator=random)
            out = base.clone()
            batch.begin(layer, group, x)(out.split(widths, dim=1))
            for module, found, before in zip(
                modules, out.split(widths, dim=1), base.split(widths, dim=1), strict=True
            ):
                expected = before.clone()
                for row, owner in enumerate(per_row):
                    if owner is None:
                        continue
                    path = f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}"
                    linear = models[owner].get_submodule(path)
                    if hasattr(linear, "get_delta_weight"):
                        expected[row] += linear.get_delta_weight("default").detach() @ x[row]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
                assert torch.equal(found[:2], before[:2])
                assert torch.equal(found[-1:], before[-1:])


def test_a_slot_that_changed_hands_serves_its_new_adapter_alone(tmp_path: Path) -> None:
    first, second = (
        read_adapter(folder, SHAPES)
        for folder in make_zoo(tmp_path, BASE, ("rank-64", "rank-8-attention")).values()
    )
    pool = LoraPool(SHAPES, capacity_rows=64, max_adapters=1, dtype=torch.float32, device=CPU)
    assert pool.load(first) == pool.load(second) == 0
    batch = LoraBatch(pool, work_list([0], [1], CPU))
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(1, 32)
    batch.begin(0, "down", x)((y,))
    assert not y.any()  # the first had a down, the second has none
    batch.begin(0, "o", x[:, :32])((y,))
    pair = second.pairs[0, "o"]
    torch.testing.assert_close(y, x[:, :32] @ pair.a.T @ pair.b * pair.scaling)
