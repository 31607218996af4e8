"""The CPU's attention over latent vectors against the reference."""

from dataclasses import replace

import pytest
import torch
from latent_steps import LATENT, MIXES, PAGE, ROPE, case

from personae.kernels import reference, reference_latent
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.operators import latent_attention
from personae.kernels.registry import operators

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _native() -> None:
    if "latent_attention" not in operators("cpu"):
        pytest.skip("the CPU kernels are not compiled here")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", [20, 4, 8], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_equals_the_reference(mix: str, heads: int, dtype: torch.dtype) -> None:
    q, cache, plan = case(MIXES[mix], heads, dtype)
    found = latent_attention(q, cache, plan, 0.3)
    meant = reference_latent.latent_attention(q.float(), cache.float(), plan, 0.3)
    assert found.dtype is dtype
    assert (found.float() - meant).abs().max() < TOLERANCE[dtype]


def test_an_int8_cache_has_its_values() -> None:
    q, cache, plan = case(MIXES["decode"], 20, torch.float32)
    kept = torch.zeros(*cache.shape[:3], LATENT + ROPE + 2, dtype=torch.int8)
    for row in plan.absorbed:
        own = plan.vectors(row, cache).unsqueeze(1)
        pages = plan.batch.page_table[row.number].long()
        places = (pages.view(-1, 1) * PAGE + torch.arange(PAGE)).flatten()[: row.length]
        reference.append_latent(own, kept, places)
    found = latent_attention(q, kept, plan, 0.3)
    meant = reference_latent.latent_attention(q, kept, plan, 0.3)
    assert (found - meant).abs().max() < 3e-6
    assert not torch.equal(found, latent_attention(q, cache, plan, 0.3))


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    q, cache, plan = case(MIXES["decode in splits"], 20, torch.bfloat16)
    whole = latent_attention(q, cache, plan, 0.3)
    for number in range(3):
        batch = plan.batch
        alone = replace(
            batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_length=batch.kv_length[number : number + 1],
            page_table=batch.page_table[number : number + 1],
            write_index=batch.write_index[number : number + 1],
            host=None,
        )
        found = latent_attention(q[number : number + 1], cache, LatentPlan(alone, LATENT, 32), 0.3)
        assert torch.equal(found[0], whole[number])
