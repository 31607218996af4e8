"""Layers whose blocks run in torch, without kernels of ours: does a GPU compute what a CPU does?

Latent attention, short convolutions, gated delta nets and Mamba-2.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.kv import KVCache
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.delta_net import DeltaNetSpec
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.short_convolution import ShortConvolutionSpec
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.evals.bench.gpu.checks import Check, relative_error
from personae.evals.bench.gpu.shapes import PAGE, attention_batch, noise

WIDTH = 256
LIMIT = 1e-4  # float32, and sums in other orders
BLOCKS: dict[str, BlockSpec] = {
    "latent attention": LatentAttentionSpec(8, 32, 16, 32, 64, RopeConfig(theta=10000.0), query_latent=96),
    "short convolutions": ShortConvolutionSpec(WIDTH, 3),
    "gated delta nets": DeltaNetSpec(8, 4, 32, 32, 4, interleaved=False, eps=1e-6),
    "Mamba-2": MambaSpec(8, 32, 64, 2, 4, conv_bias=True, bias=False, limits=(0.0, 100.0), eps=1e-5),
}
STEPS = ([(70, 70), (3, 3)], [(1, 71), (1, 4)], [(1, 72), (20, 24)])
"""Of two sequences (tokens of the step, tokens in all)."""


def block_checks(generator: torch.Generator, width: int = WIDTH) -> Iterator[Check]:
    """The worst step's error. width: of the residual stream."""
    for name, spec in BLOCKS.items():
        config = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=512,
            hidden_size=width,
            max_position=256,
            eps=1e-5,
            tie=True,
            layer_specs=(LayerSpec(spec, MlpSpec(width)),) * 2,
        )
        there, here = (_Runner(config, device) for device in (generator.device, torch.device("cpu")))
        for (_, own), (_, same) in zip(there.model.tensors(), here.model.tensors(), strict=True):
            values = noise(tuple(same.shape), torch.float32, generator)
            values *= 0.3 if values.dim() == 1 else values.shape[1] ** -0.5
            own.copy_(values)
            same.copy_(values.cpu())
        errors = []
        for rows in STEPS:
            tokens = torch.randint(
                512, (sum(count for count, _ in rows),), generator=generator, device=generator.device
            )
            found, truth = there.step(rows, tokens), here.step(rows, tokens.cpu())
            errors.append(relative_error(found.cpu(), truth))
        yield Check(f"blocks in torch, {name}", max(errors, key=lambda error: (error != error, error)), LIMIT)


class _Runner:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.model = Decoder(config, dtype=torch.float32, device=device)
        self.device = device
        layout = MemoryLayout(16, PAGE, 2, config.max_position, 128)
        self.kv = KVCache(config.kv_specs, layout, torch.float32, device)

    def step(self, rows: list[tuple[int, int]], tokens: Tensor) -> Tensor:
        """The residual stream of the step's tokens. Each sequence has 8 pages, in order."""
        batch, _ = attention_batch(rows, self.device, seed=1)
        positions = torch.cat([torch.arange(keys - count, keys) for count, keys in rows])
        first = torch.cat([torch.full((count,), 8 * PAGE * row) for row, (count, _) in enumerate(rows)])
        table = torch.arange(16, dtype=torch.int32).view(2, 8).to(self.device)
        batch = replace(batch, page_table=table, write_index=(first + positions).to(self.device))
        return self.model.forward(tokens, positions.to(self.device), self.kv, batch, None)
