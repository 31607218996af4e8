"""The whole engine on a simulated GPU: the executor's own thread, adapters read on other threads, and more
adapters than fit."""

import os
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
import torch
from virtual_clock import real_clock

pytestmark = [
    *real_clock,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
        reason="needs Triton's compiler, and no GPU",
    ),
]
from paper_gpu import PaperGpu  # noqa: E402  # below the mark that says what they need
from tiny_adapters import make_adapter_folder  # noqa: E402
from tiny_models import model_folder  # noqa: E402

from personae.actors.assembly import Assembly, assemble  # noqa: E402
from personae.actors.client import EngineClient  # noqa: E402
from personae.actors.in_process import open_in_process  # noqa: E402
from personae.actors.options import EngineOptions  # noqa: E402
from personae.engine.params import SamplingParams  # noqa: E402
from personae.engine.sequence import SequenceLog  # noqa: E402
from personae.engine.step import StepEngine  # noqa: E402

NAMES = ("one", "two", "three")
ADAPTER = 1 << 17  # bytes, for one of them at a time


def assembled(base: Path, root: Path, device: str) -> Assembly:
    sizes = {"max_seqs": 4, "max_batch_tokens": 32, "max_model_len": 128, "adapter_memory": ADAPTER}
    return assemble(EngineOptions(base, (root,), device=device, dtype="float32", **sizes))


async def answers(assembly: Assembly, client: EngineClient) -> dict[str, tuple[int, ...]]:
    """Run all requests at the same time."""
    models = assembly.engine_spec.models
    found: dict[str, list[int]] = defaultdict(list)

    async def ask(name: str | None, number: int) -> None:
        params = SamplingParams(max_tokens=7, temperature=0.0, seed=1)
        tokens, adapter = tuple(range(30 + number, 50)), None if name is None else models[name].adapter
        log = SequenceLog(f"{name} {number}", tokens, len(tokens), params, adapter=adapter, eos=(0, 2))
        async with client.stream([log]) as stream:
            async for delta in stream:
                assert delta.error is None
                found[log.id] += delta.tokens

    async with anyio.create_task_group() as tasks:
        for number in range(2):
            for name in (*NAMES, None):
                tasks.start_soon(ask, name, number)
    return {id: tuple(tokens) for id, tokens in found.items()}


@pytest.mark.parametrize("granule", [None, 1 << 14], ids=["fixed shares", "shared memory"])
async def test_answers_equal_those_of_a_cpu(granule: int | None, tmp_path: Path) -> None:
    base = model_folder("qwen3", num_hidden_layers=2)
    for seed, name in enumerate(NAMES):
        make_adapter_folder(tmp_path / name, base, rank=8, seed=seed)
    plain = assembled(base, tmp_path, "cpu")
    async with open_in_process(plain.engine_spec) as client:
        wanted = await answers(plain, client)
    with PaperGpu(24 << 20, granule=granule) as gpu:
        ours = assembled(base, tmp_path, "cuda")

        def build() -> StepEngine:
            gpu.adopt_this_thread()
            return ours.engine_spec.build_step_engine()

        async with open_in_process(replace(ours.engine_spec, build_step_engine=build)) as client:
            found = await answers(ours, client)
            if granule is None:
                assert client.stats().adapters.evictions > 0, "all of them fit"
            else:
                assert client.stats().pages_lent > 0, "no memory was lent"
                assert client.stats().adapters.evictions == 0
        assert gpu.machine.launches["expand_kernel"]
    assert found == wanted
    assert len(found) == 8
