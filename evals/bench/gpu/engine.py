"""The engine's own decode step as a graph: does it match its kernels without a graph, and how long does it
take?"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import nan

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.kv import KVCache, pages_of_a_run
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import LayerSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.capture import Capture
from personae.engine.worker.graphs import DecodeGraphs
from personae.evals.bench.gpu.checks import Check
from personae.evals.bench.gpu.shapes import DIM, HEADS, HIDDEN, INNER, KV_HEADS, PAGE, attention_batch, noise
from personae.evals.bench.gpu.timing import event_time
from personae.kernels.attention import AttentionBatch
from personae.kernels.memory import memory_of
from personae.kernels.side_stream import SideStream
from personae.kernels.vmm import Driver
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.copies import Copies
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch, lora_batch
from personae.lora.shapes import LoraShapes
from personae.lora.weight_pools import pool_bytes

LIMIT = 0.02  # bfloat16; products differ if a bucket has more rows than the step
ROWS = 64
RANKS = (16, 8, 64, 1) * 4
CAPACITY = 512  # ranks
ATTENTION = AttentionSpec(HEADS, KV_HEADS, DIM, rope=RopeConfig(theta=500000.0))
SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=HIDDEN,
    max_position=2048,
    eps=1e-5,
    tie=True,
    layer_specs=(LayerSpec(ATTENTION, MlpSpec(INNER)),) * 8,
)
Mix = Sequence[int | None]


class Rig:
    """A decoder with random weights, adapters in its pool, and graphs of its decode steps. side_stream: for
    parallel work within these. `lends`: its cache and its adapters share memory, or DriverError is raised."""

    def __init__(
        self,
        config: ModelConfig,
        capture: Capture,
        generator: torch.Generator,
        dtype: torch.dtype = torch.bfloat16,
        copies: Copies | None = None,
        *,
        side_stream: SideStream | None = None,
        lends: bool = False,
    ) -> None:
        device = generator.device
        self.config, self.device, self._generator = config, device, generator
        self.model = Decoder(config, dtype=dtype, device=device)
        for name, tensor in self.model.tensors():
            noisy = noise(tuple(tensor.shape), dtype, generator)
            tensor.copy_(
                noisy if len(tensor.shape) == 1 or "embed" in name else noisy * tensor.shape[1] ** -0.5
            )
        shapes, page_bytes = (
            LoraShapes(config.layers, config.lora_sites),
            KVCache.bytes_per_page(config.kv_specs, PAGE, dtype),
        )
        pages, run, lent = ROWS * -(-config.max_position // PAGE) + 1, 1, 0
        if lends:
            granule = Driver(device).granule
            run = pages_of_a_run(page_bytes, granule)
            pages = -(-pages // run) * run
            lent = (pages + 1) * page_bytes + pool_bytes(shapes, CAPACITY, dtype, granule)
        memory = memory_of(device, lent)
        self.pool = LoraPool(
            shapes,
            capacity_rows=CAPACITY,
            max_adapters=2 * len(RANKS) if lends else len(RANKS),
            dtype=dtype,
            device=device,
            spare_rows=CAPACITY if lends else 0,
            copies=copies,
            memory=memory,
        )
        self.adapters: list[Adapter] = []
        for index, rank in enumerate(RANKS):
            pairs = {
                (layer, module): LoraPair(
                    torch.randn(rank, site.inputs) * site.inputs**-0.5, torch.randn(rank, site.outputs), 0.25
                )
                for layer in range(config.layers)
                for module, site in config.lora_sites.items()
            }
            self.adapters.append(make_adapter(f"{index}", pairs, digest=f"{index}"))
            assert self.pool.load(self.adapters[-1]) == index
        self.layout = MemoryLayout(pages, PAGE, ROWS, config.max_position, 512, run=run)
        self.kv = KVCache(config.kv_specs, self.layout, dtype, device, spare=True, memory=memory)
        self.kv.data.copy_(noise(tuple(self.kv.data.shape[1:]), dtype, generator))
        self.graphs, self.on_one_stream = (
            DecodeGraphs(self.model, self.kv, self.pool, self.layout, capture, own)
            for own in (side_stream, None)
        )

    def step(self, mix: Mix, lengths: Sequence[int]) -> "RigStep":
        """A row per entry of `mix` (an adapter's number or None), each with a context of that many tokens."""
        rows = len(mix)
        batch, _ = attention_batch([(1, length) for length in lengths], self.device, seed=sum(lengths))
        tokens = torch.randint(self.config.vocab_size, (rows,), generator=self._generator, device=self.device)
        positions = (batch.kv_length - 1).long()
        return RigStep(self, tokens, positions, batch, lora_batch(self.pool, list(mix), [1] * rows))


class RigStep:
    """One decode step of a rig."""

    def __init__(
        self, rig: Rig, tokens: Tensor, positions: Tensor, batch: AttentionBatch, lora: LoraBatch | None
    ) -> None:
        self._rig, self.batch, self._lora = rig, batch, lora
        self.tokens, self.positions = tokens, positions

    def eager(self) -> Tensor:
        """Kernel by kernel."""
        rig = self._rig
        lora = None
        if self._lora is not None and self._lora.work is not None:  # plans its adapters, as each step does
            lora = LoraBatch(rig.pool, replace(self._lora.work, plans={}))
        return rig.model.forward(self.tokens, self.positions, rig.kv, self.batch, lora)

    def replayed(self, graphs: DecodeGraphs | None = None) -> Tensor | None:
        """By one of the rig's graphs; None if it has none."""
        work = None if self._lora is None else self._lora.work
        return (graphs or self._rig.graphs).run(self.tokens, self.positions, self.batch, work)


def cases(config: ModelConfig) -> Iterator[tuple[str, Mix, list[int]]]:
    """Steps in order. Each step but the first of its bucket replays a graph that another step was captured
    with."""
    most = config.max_position
    short, long = [most // 8] * 16, [most - 1 - row for row in range(16)]
    yield "one adapter", [0] * 16, short
    yield "fewer adapters than at the capture", [3, *[None] * 15], long
    yield "more adapters than at the capture", list(range(16)), long
    yield "base rows among them", [0, 0, 5, 9, *[None] * 12], [1 + row for row in range(16)]
    yield "no adapter", [None] * 16, short
    yield "no adapter, longer", [None] * 16, long
    yield "5 rows in a bucket of 6", [1, 2, 2, None, None], long[:5]
    yield "6 rows in it", [4, 5, 6, 7, 8, 8], short[:6]


def engine_checks(rig: Rig) -> Iterator[Check]:
    """The worst row's error compared with the step kernel by kernel; NaN if there was no graph."""
    for name, mix, lengths in cases(rig.config):
        step = rig.step(mix, lengths)
        truth = step.eager().double()
        found = step.replayed()
        error = nan
        if found is not None:
            error = float(((found.double() - truth).norm(dim=1) / truth.norm(dim=1)).max())
        yield Check(f"engine, decode step as a graph, {name}", error, LIMIT)


def engine_table(rig: Rig) -> Iterator[dict[str, object]]:
    """A decode step's layers from the first work on the device to the last, in microseconds: kernel by
    kernel, as a graph, and as a graph in which shrink runs after the base's products instead of in
    parallel."""
    for rows in (1, 8, ROWS):
        mixes: dict[str, Mix] = {
            "none": [None] * rows,
            f"{min(rows, 16)}": sorted(row % 16 for row in range(rows)),
        }
        for name, mix in mixes.items():
            step = rig.step(mix, [rig.config.max_position // 2] * rows)
            row: dict[str, object] = {"rows": rows, "adapters": name, "layers": rig.config.layers}
            row["kernel by kernel us"] = event_time(step.eager)
            for how, graphs in {"as a graph": rig.graphs, "on one stream": rig.on_one_stream}.items():
                if step.replayed(graphs) is None:
                    row["left out"] = f"no graph {how}"
                else:
                    row[f"{how} us"] = event_time(partial(step.replayed, graphs))
            yield row
