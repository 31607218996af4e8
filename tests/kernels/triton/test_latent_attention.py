"""The Triton attention over latent vectors in the interpreter against the reference."""

import pytest
import torch
from latent_steps import MIXES, case

from personae.kernels import reference_latent
from personae.kernels.triton import latent_attention as host
from personae.kernels.triton.sizes import Gpu

GPU = Gpu(64, hopper=True)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHORTEST_SPLIT", 64)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "dtype"), [(20, torch.float32), (4, torch.float16)], ids=str)
def test_it_equals_the_reference(mix: str, heads: int, dtype: torch.dtype) -> None:
    q, cache, plan = case(MIXES[mix], heads, dtype)
    found = host.latent_attention(q, cache, plan, 0.3, GPU)
    meant = reference_latent.latent_attention(q.float(), cache.float(), plan, 0.3)
    assert [prompt.number for prompt in plan.prompts] == ([1] if "prompt" in mix else [])
    for run in plan.runs:
        assert (found[run].float() - meant[run]).abs().max() < TOLERANCE[dtype]
