"""After the warm-up no step needs a kernel that has not been compiled, whatever its shape, at the size of
life."""

import os
from dataclasses import replace
from importlib.util import find_spec
from random import Random

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from paper_gpu import PaperGpu  # noqa: E402  # below the mark, which says what they need

from personae.engine.kv import KVCache  # noqa: E402
from personae.engine.models.decoder import Decoder  # noqa: E402
from personae.engine.plan import MemoryLayout, Row  # noqa: E402
from personae.engine.worker.capture import CudaCapture  # noqa: E402
from personae.engine.worker.graphs import DecodeGraphs  # noqa: E402
from personae.engine.worker.known import KnownTokens  # noqa: E402
from personae.engine.worker.runner import Runner  # noqa: E402
from personae.engine.worker.warm_up import shapes, warm_up  # noqa: E402
from personae.errors import AdapterError  # noqa: E402
from personae.evals.bench.gpu.engine import ATTENTION, SHAPE  # noqa: E402
from personae.evals.bench.gpu.shapes import VOCAB, sampling_rows  # noqa: E402
from personae.kernels.masks import Scratch  # noqa: E402
from personae.kernels.operators import choose  # noqa: E402
from personae.kernels.side_stream import SideStream  # noqa: E402
from personae.lora.adapter import Adapter  # noqa: E402
from personae.lora.pool import LoraPool  # noqa: E402
from personae.lora.shapes import LoraShapes  # noqa: E402
from personae.lora.source import AdapterSource  # noqa: E402

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CONFIG = replace(
    SHAPE,
    vocab_size=VOCAB,
    layer_specs=tuple(
        replace(SHAPE.layer_specs[0], attention=replace(ATTENTION, window=w)) for w in (None, 4096)
    ),
    max_position=131072,
    tie=False,
)
LAYOUT = MemoryLayout(8192, 16, 256, 131072, 4096)


def no_adapter(digest: str, source: AdapterSource) -> Adapter:
    raise AdapterError("there is none")


def runner_of(graphs: bool = True) -> Runner:
    """A model of 8B's shape, but for the number of its layers."""
    model = Decoder(CONFIG, dtype=BF16, device=CUDA)
    pool = LoraPool(
        LoraShapes(CONFIG.layers, CONFIG.lora_sites),
        capacity_rows=1024,
        max_adapters=128,
        dtype=BF16,
        device=CUDA,
    )
    kv = KVCache(CONFIG.kv_specs, LAYOUT, BF16, CUDA, spare=True)
    captured = DecodeGraphs(model, kv, pool, LAYOUT, CudaCapture(), SideStream()) if graphs else None
    return Runner(model, kv, LAYOUT, pool, no_adapter, captured)


def drawn(runner: Runner, random: Random) -> tuple[Row, ...]:
    """The rows of a step: decode, short prompts and long ones, contexts of any length, whoever's."""
    rows: list[Row] = []
    left = LAYOUT.max_batch_tokens
    for slot in range(random.choice((1, 3, 20, 70, 256))):
        start = random.choice((0, random.randrange(3000), random.randrange(131000)))
        count = random.choice((1, 1, 1, random.randint(2, 20), random.randint(1, 3000)))
        count = min(count, left, LAYOUT.max_model_len - start)
        if count:
            rows.append(Row(slot, start, count, samples=True))
            adapter = random.choice((None, random.randrange(128)))
            runner._adapter_slot.pop(slot, None)
            if adapter is not None:
                runner._adapter_slot[slot] = adapter
            left -= count
    return tuple(rows)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=["sm_90", "sm_80"])
def test_every_kernel_that_a_step_may_need_has_been_compiled(capability: tuple[int, int]) -> None:
    processors = 132 if capability == (9, 0) else 108
    with PaperGpu(139 << 30, blank=True, processors=processors, capability=capability) as gpu:
        runner, random = runner_of(), Random(1)
        warm_up(runner)
        ready = set(gpu.machine.compiled)
        assert 40 < len(ready) < 80  # about a second each, when a machine sees the model for the first time
        gpu.machine.compiled.clear()
        graphs = runner.graphs
        for number in range(16):
            rows = drawn(runner, random)
            if number % 4 == 0:  # decode alone, with graphs and without
                rows = tuple(Row(row.slot, row.start, 1, samples=True) for row in rows)
            runner.graphs = graphs if number % 8 else None
            packed = runner.pack(rows, KnownTokens(LAYOUT.max_seqs, VOCAB))
            logits = runner.logits(runner.forward(packed)).logits
            words = torch.zeros(len(rows), -(-VOCAB // 32), dtype=torch.int32)
            choose(logits, sampling_rows(len(rows), 1), words if number % 3 else None, Scratch(CUDA))
            assert gpu.machine.compiled <= ready, gpu.machine.compiled - ready
        logit_mask = {name for name, _ in gpu.machine.compiled}
        assert len(logit_mask) == len({name for name, _ in ready}), "the steps were too much alike"
        assert len(gpu.machine.compiled) > len(ready) / 2


def test_shapes_stay_within_the_layout() -> None:
    for layout in (LAYOUT, MemoryLayout(4, 16, 1, 40, 16), MemoryLayout(9, 16, 300, 16, 300)):
        for spans in shapes(layout):
            assert 1 <= len(spans) <= layout.max_seqs
            assert 1 <= sum(count for _, count in spans) <= layout.max_batch_tokens
            assert all(count >= 1 and start + count <= layout.max_model_len for start, count in spans)
