"""A layer: two blocks, each behind a norm, whose outputs are added to the residual stream."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.layers.altup import AltUp
from personae.engine.layers.attention import Attention
from personae.engine.layers.block import Block, BlockContext, KVSpec, LayerSpec, NoBlock, OfBlocks
from personae.engine.layers.dense_and_experts import DenseAndExperts
from personae.engine.layers.mlp import MLP
from personae.engine.layers.moe import MoE
from personae.engine.layers.norm import Norm, RMSNorm
from personae.engine.layers.step import ForwardContext
from personae.engine.parallel.comm import ONE_RANK, OwnRows
from personae.kernels.decoder import LayerWeights, Weight
from personae.lora.shards import Shard

Run = Callable[[Tensor, ForwardContext], Tensor]
"""Half of a layer."""


class Layer(OfBlocks):
    """h += attention(norm(h)); h += mlp(norm(h)). Some families scale or normalise each half's output too.
    Each addition is deferred, to be fused with the next norm. `own_rows`: what ranks exchange that share the
    MLP and nothing else."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, context: BlockContext, own_rows: OwnRows | None = None
    ) -> None:
        self.prefix = context.prefix
        self._own_rows, self._shares_further = own_rows, spec.shares_further
        shared = context if own_rows is None else replace(context, comm=own_rows)
        self.mlp = spec.mlp.build(shared)
        if own_rows is not None:
            context = replace(context, comm=ONE_RANK)
        self.attention = spec.attention.build(context)
        runs: tuple[Run, Run] = self.attention, self._shared(self.mlp)
        self._halves = [
            (half, run)
            for half, (block, run) in enumerate(zip((self.attention, self.mlp), runs, strict=True))
            if not isinstance(block, NoBlock)
        ]
        self._norms: dict[str, Norm] = {
            name: context.norm(config.hidden_size)
            for name in (*(config.pre_norms or ()), *(config.post_norms or ()))
        }
        self.pre_norms, self.post_norms = (
            None if names is None else (self._norms[names[0]], self._norms[names[1]])
            for names in (config.pre_norms, config.post_norms)
        )
        self.scale, self.parallel = config.residual_scale, config.parallel
        self.further: Block | None = None
        self._run_further: Run | None = None
        if spec.further is not None:
            self.further = spec.further.build(shared if spec.shares_further else context)
            self._run_further = self._shared(self.further) if spec.shares_further else self.further
        self.scalar = (
            torch.empty(1, dtype=torch.float32, device=context.device) if config.layer_scalars else None
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """(output not added yet, residual stream) -> the same after this layer. None means zero."""
        if self.parallel:
            return self._in_parallel(x, residual, step)
        if isinstance(self.further, AltUp):
            return self._in_streams(self.further, x, step), None
        for half, run in self._halves:
            normed, residual = self._half_input(x, residual, half)
            x = self._half_output(run(normed, step), half)
        if self.further is None and self.scalar is None:
            return x, residual
        x = x if residual is None else residual + x
        if self._run_further is not None:
            x = x + self._run_further(x, step)
        return x if self.scalar is None else x * self.scalar.to(x.dtype), None

    def take_part(self, nothing: Tensor, step: ForwardContext) -> None:
        """Compute for other ranks' tokens; this rank has none: [0, hidden]."""
        if not isinstance(self.mlp, NoBlock):
            self._shared(self.mlp)(nothing, step)
        if self._shares_further and self._run_further is not None:
            self._run_further(nothing, step)

    def _shared(self, block: Block) -> Run:
        """What runs a block that ranks share: if each has rows of its own, for all their tokens, with the
        result for this rank's."""
        if (own_rows := self._own_rows) is None:
            return block

        def run(x: Tensor, step: ForwardContext) -> Tensor:
            assert step.whole is not None
            return block(own_rows.gather(x), step.whole)

        return run

    def _in_parallel(self, x: Tensor, residual: Tensor | None, step: ForwardContext) -> tuple[Tensor, Tensor]:
        """h += attention(norm(h)) + mlp(norm(h))."""
        total = x if residual is None else residual + x
        first, second = (norm(total) for norm in self.pre_norms) if self.pre_norms else (total, total)
        (_, attention), (_, mlp) = self._halves
        mixed = self._half_output(attention(first, step), 0)
        return mixed + self._half_output(mlp(second, step), 1), total

    def _in_streams(self, altup: AltUp, streams: Tensor, step: ForwardContext) -> Tensor:
        """All residual streams [T, streams, hidden] -> the same after this layer, see `AltUp`."""
        assert self.pre_norms is not None
        predicted = altup.predict(streams, step)
        x = predicted[:, altup.spec.active]
        normed = self.pre_norms[0](x)
        (_, attention), (_, mlp) = self._halves
        x = x + self._half_output(attention(normed, step), 0) + altup.laurel(normed, step)
        x = x * 0.5**0.5
        x = x + self._half_output(mlp(self.pre_norms[1](x), step), 1)
        return altup.correct(predicted, x, step)

    def _half_input(self, x: Tensor, residual: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
        """(the input of a half of the layer, the residual stream with x added)."""
        if self.pre_norms is not None and residual is not None:
            return self.pre_norms[half].add(x, residual)
        total = x if residual is None else residual + x
        return total if self.pre_norms is None else self.pre_norms[half](total), total

    def _half_output(self, x: Tensor, half: int) -> Tensor:
        """What a half of the layer adds to the residual stream."""
        if self.post_norms is not None:
            x = self.post_norms[half](x)
        return x if self.scale == 1.0 else x.mul_(self.scale)

    @property
    def read(self) -> KVSpec | None:
        """What its attention reads of every token."""
        return self.attention.spec.read if isinstance(self.attention, Attention) else self.attention.kv

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks, in order."""
        return (self.attention, self.mlp, *(() if self.further is None else (self.further,)))

    @property
    def experts(self) -> MoE | None:
        """Its mixture of experts; None if it has none."""
        for block in self.blocks:
            if isinstance(block, DenseAndExperts):
                return block.sparse
            if isinstance(block, MoE):
                return block
        return None

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill)."""
        yield from super().tensors()
        if self.scalar is not None:
            yield f"{self.prefix}.layer_scalar", self.scalar
        for name, norm in self._norms.items():
            yield from norm.tensors(f"{self.prefix}.{name}")

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        for block in self.blocks:
            yield from block.shards()

    def norms(self) -> Iterator[Norm]:
        """All its norms."""
        yield from self._norms.values()
        yield from super().norms()

    def weights(self) -> LayerWeights | None:
        """The whole layer as tensors; None if `kernels/decoder.py` does not support it."""
        attention, mlp, norms = self.attention, self.mlp, _weights_of(self.pre_norms)
        if (
            not isinstance(attention, Attention)
            or not isinstance(mlp, MLP | MoE)
            or norms is None
            or self.post_norms is not None
            or self.parallel
            or self.further is not None
            or self.scalar is not None
            or self.scale != 1.0
            or not attention.spec.plain
            or not (mlp.plain if isinstance(mlp, MoE) else mlp.spec.plain)
        ):
            return None
        experts, dense = (mlp, mlp.shared) if isinstance(mlp, MoE) else (None, mlp)
        return LayerWeights(
            norms[0],
            attention.qkv.weights,
            _weights_of(attention.qk_norms),
            attention.o.weights,
            norms[1],
            None if dense is None else dense.weights,
            None if experts is None else experts.weights,
            mlp.spec.activation == "silu_clamped",
            attention.spec.window,
            attention.rope,
            attention.sinks,
        )


def _weights_of(norms: tuple[Norm, Norm] | None) -> tuple[Tensor, Tensor] | None:
    """The weights of two RMS norms."""
    if norms is None or not isinstance(norms[0], RMSNorm) or not isinstance(norms[1], RMSNorm):
        return None
    return norms[0].weight, norms[1].weight
