"""The decoder that all families share: embedding, layers of two blocks each, norm, output matrix.

It works on packed tokens: T tokens of many sequences in a row, without padding. `ModelConfig` has the
differences between families: the blocks of each layer, norms, scales, tying.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.kv import KVCache
from personae.engine.layers.altup import AltUpSpec, AltUpStreams
from personae.engine.layers.attention import Attention
from personae.engine.layers.block import BlockContext
from personae.engine.layers.embedding import TokenEmbedding
from personae.engine.layers.latent_attention import LatentAttention
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import LayerNorm, Norm, RMSNorm
from personae.engine.layers.per_layer_embedding import PerLayerEmbedding
from personae.engine.layers.rotary import RopeConfig, rotary_tables
from personae.engine.layers.step import ForwardContext, RankShare, StepPart
from personae.engine.model_files import ModelFiles
from personae.engine.models.layer import Layer
from personae.engine.parallel.comm import ONE_RANK, Comm, OwnRows
from personae.engine.parallel.pipeline import Incoming, Pipeline
from personae.engine.quantization import scheme_of
from personae.engine.quantization.base import EMBEDDING, OUTPUT, Scheme
from personae.engine.quantization.unquantized import batch_invariant
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionPlan, ReferenceAttention, attention_backend
from personae.kernels.decoder import (
    DecoderWeights,
    FusedDecoder,
    LayerWeights,
    LoraStep,
    PackedLayout,
    PackedLinear,
    PackedPlace,
    Tapped,
    Weight,
    fuse,
    packed_layout,
)
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.states import plan_states
from personae.lora.context import LoraContext, LoraOutput
from personae.lora.shapes import Fingerprint
from personae.lora.shards import OUTPUTS, Shard


class Decoder:
    """A decoder-only transformer. Its parameters are allocated here and filled by `engine/loader.py`.

    `max_position` limits the rope tables to the longest context that will run; None means the model's own.
    `scheme`: the format of each linear module's weight, None for `dtype`. The embedding is in `dtype` or in a
    file's bits, even if it is also the output matrix: a step reads only one row of it per token.

    `comm`: the ranks that share the model, of which this is one. `config` is that of the whole model;
    `self.shared` has this rank's part of all layers, and `self.config` those of its stage, numbered from 0. A
    rank of stage 0 has some rows of the embedding and of the output matrix; a later stage has none. All ranks
    have all hidden states, and those of stage 0 all logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        scheme: Scheme | None = None,
        comm: Comm = ONE_RANK,
    ) -> None:
        self.whole, self.comm = config, comm
        self.shared = config.of_rank(
            comm.rank, comm.size, comm.expert_groups, attention_ranks=comm.attention_ranks
        )
        self._own_rows = OwnRows(comm) if comm.attention_ranks else None
        self.config = config = self.shared.of_stage(comm.stage, comm.stages)
        self.dtype = dtype
        self.device = device
        kept = scheme or scheme_of(None)
        if any(block.discrete for layer in self.whole.layer_specs for block in layer.blocks):
            kept = batch_invariant(kept)

        def norm(size: int) -> Norm:
            if config.norm == "layer":
                return LayerNorm(
                    size, config.eps, device=device, bias=config.norm_bias, offset=config.norm_offset
                )
            return RMSNorm(size, config.eps, dtype=dtype, device=device, offset=config.norm_offset)

        @cache
        def rope(kind: RopeConfig, head_dim: int) -> tuple[Tensor, Tensor]:
            return rotary_tables(kind, head_dim, positions, device)

        positions = min(config.max_position, max_position or config.max_position)
        bounds = [rank * config.vocab_size // comm.size for rank in range(comm.size + 1)]
        self._vocabulary = bounds[comm.rank], bounds[comm.rank + 1]
        self.vocabulary_widths = [stop - start for start, stop in pairwise(bounds)]
        tokens = 0 if comm.stage else self.vocabulary_widths[comm.rank]
        rows = [Shard(OUTPUTS, (self._vocabulary,))] if comm.size > 1 else []
        self.embedding = TokenEmbedding(
            (EMBEDDING,), tokens, config.hidden_size, scheme=kept, dtype=dtype, device=device
        )
        contexts = [
            BlockContext(
                index,
                (index, config.layers + index),
                f"model.layers.{config.first_layer + index}",
                config.hidden_size,
                dtype,
                device,
                kept,
                norm,
                rope,
                comm,
            )
            for index in range(config.layers)
        ]
        self.layers = [
            Layer(config, spec, context, self._own_rows)
            for spec, context in zip(config.layer_specs, contexts, strict=True)
        ]
        self.per_layer: PerLayerEmbedding | None = None
        if config.per_layer_embedding is not None:
            size, count = config.per_layer_embedding
            own = range(config.first_layer, config.first_layer + config.layers)
            self.per_layer = PerLayerEmbedding(
                size, own, self.whole.layers, count, config.vocab_size, contexts[0]
            )
        further = config.layer_specs[0].further
        self.streams = AltUpStreams(further.streams, contexts[0]) if isinstance(further, AltUpSpec) else None
        self.norm = norm(config.hidden_size)
        self._attention, self._plain_attention = attention_backend(device, dtype), ReferenceAttention()
        self._scores = {  # of the layers with plain attention
            index: layer.attention.scores
            for index, layer in enumerate(self.layers)
            if isinstance(layer.attention, Attention) and layer.attention.scores is not None
        }
        self._latent = next(  # which is the same in all layers
            (layer.attention.spec for layer in self.layers if isinstance(layer.attention, LatentAttention)),
            None,
        )
        self._attending = {
            index: (layer.attention.heads, read)
            for index, layer in enumerate(self.layers)
            if (read := layer.read) is not None and layer.attention.heads and not read.latent
        }
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.output = Linear(
            (OUTPUT,),
            config.hidden_size,
            (tokens,),
            bias=config.output_bias,
            method=kept((OUTPUT,)),
            dtype=dtype,
            device=device,
            shards=rows,
        )
        self._own_output = not (config.tie and self.output.method.tie(self.embedding.weight))
        self.fingerprints: dict[str, Fingerprint] = {}  # of the stored embedding and output matrix, by name
        self.quantization: str | None = None  # the name of the format of most weights
        self.weight_bytes = 0  # of its parameters, as they were loaded
        self.files: ModelFiles | None = None  # from which experts are read that come from other ranks
        self._fused: FusedDecoder | None = None

    @property
    def runs_in_one_call(self) -> bool:
        """Whether all layers run in one call, unless an adapter needs them one by one."""
        return self._fused is not None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        lora: LoraContext | None = None,
        overlap: Callable[[], None] | None = None,
        attend: Mapping[int, AttentionPlan] | None = None,
    ) -> Tensor:
        """Runs the layers over T packed tokens, and appends their keys and values to the cache. Stages use
        `forward_stage` instead, and ranks that have sequences of their own `forward_share`.

        tokens, positions: [T] int64 -> the residual stream [T, hidden_size], from which `logits` follow. It
        is in the model's dtype, or float32 if it `runs_in_one_call`. This thread calls `overlap`; if all
        layers run in one call, other threads compute in parallel. `attend`: attention by
        layer, instead of `plan`.
        """
        if self._fused is not None and attend is None:
            adapters, sums = None if lora is None else lora.fused(), self.comm.sums
            if (lora is None or adapters is not None) and (
                sums is None or self._fused.adds_up(len(tokens), sums)
            ):
                return self._forward_fused(tokens, positions, kv, batch, adapters, overlap)
        if overlap is not None:
            overlap()
        x = self._changed(self._embed(tokens), tokens, lora)
        per_layer = None if self.per_layer is None else self.per_layer(tokens, x)
        x = self._run_layers(x, positions, kv, batch, lora, attend, per_layer)
        return x if self._fused is None else x.float()

    def forward_share(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        lora: LoraContext | None,
        share: RankShare,
    ) -> Tensor:
        """As `forward`, for all ranks' tokens, where ranks have sequences of their own: this one runs
        attention over its part of them. `batch`, `lora`: of all."""
        rows, part = self._own_rows, share.part
        assert rows is not None
        rows.counts = share.counts
        whole = ForwardContext(positions, batch, {}, {}, {}, lora)
        x = self._embed(tokens)
        if part is None:
            for layer in self.layers:
                layer.take_part(x, ForwardContext(positions, batch, {}, {}, {}, None, whole=whole))
            return self.comm.gather_rows(x, share.counts)
        own = part.of(tokens)
        x = self._changed(x, own, part.lora)
        per_layer = None if self.per_layer is None else self.per_layer(own, x)
        there = part.of(positions)
        x = self._run_layers(x, there, kv, part.batch, part.lora, per_layer=per_layer, whole=whole)
        return self.comm.gather_rows(x, share.counts)

    def forward_stage(
        self, tokens: Tensor, positions: Tensor, kv: KVCache, parts: Sequence[StepPart]
    ) -> tuple[Tensor, Incoming | None]:
        """Runs the layers of this stage over one part of the tokens after the other, and sends each on to the
        next stage. Stages that have embeddings for each layer get the tokens' embeddings, too.

        On stage 0: the residual stream [T, hidden_size] after the last stage, and what says that it has come.
        On a later stage: nothing, [T, 0].
        """
        pipeline = self._pipeline
        width = 0 if pipeline.stage else self.config.hidden_size
        hidden = torch.empty(len(tokens), width, dtype=self.dtype, device=self.device)
        arrival = None if pipeline.stage else pipeline.begin_receive(hidden)
        last = pipeline.stage == pipeline.stages - 1
        for part in parts:
            own = part.of(tokens)
            x, embedded = self._stage_inputs(own, part.lora)
            per_layer = None if self.per_layer is None else self.per_layer(own, embedded)
            x = self._run_layers(x, part.of(positions), kv, part.batch, part.lora, per_layer=per_layer)
            pipeline.send(x if last or self.per_layer is None else torch.cat((x.flatten(1), embedded), 1))
        return hidden, arrival

    def _stage_inputs(self, tokens: Tensor, lora: LoraContext | None) -> tuple[Tensor, Tensor]:
        """What the first layer reads, and the embedded tokens, if there are embeddings for each layer."""
        hidden, with_embedded = self.config.hidden_size, self.per_layer is not None
        if self._pipeline.stage == 0:
            embedded = self._changed(self._embed(tokens), tokens, lora)
            return embedded.clone() if with_embedded else embedded, embedded
        size = hidden if self.streams is None else hidden * self.streams.count
        width = size + hidden * with_embedded
        x = torch.empty(len(tokens), width, dtype=self.dtype, device=self.device)
        self._pipeline.receive(x)
        return (x[:, :size].contiguous(), x[:, size:]) if with_embedded else (x, x)

    @property
    def _pipeline(self) -> Pipeline:
        assert isinstance(self.comm, Pipeline)
        return self.comm

    def _run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        lora: LoraContext | None,
        attend: Mapping[int, AttentionPlan] | None = None,
        per_layer: Tensor | None = None,
        whole: ForwardContext | None = None,
    ) -> Tensor:
        """What the first layer reads [T, H] -> the residual stream after the last layer [T, H]. Where there
        are several streams, stages give each other all of them: [T, streams * H] -> [T, streams, H]."""
        states = plan_states(batch, kv.page_size) if kv.states else None
        attend = attend or self.plan(kv, batch)
        latent = None
        if self._latent is not None:
            width, plain = self._latent.plain_dim + self._latent.value_dim, lora is None or not lora.rescales
            latent = LatentPlan(batch, self._latent.latent, width, plain=plain)
        step = ForwardContext(
            positions, batch, kv.layers, kv.states, attend, lora, states, latent, per_layer, whole
        )
        residual: Tensor | None = None
        kept = []
        if self.streams is not None:
            x = x.view(len(x), self.streams.count, -1) if self.comm.stage else self.streams.apart(x)
        for index, layer in enumerate(self.layers):
            if kv.reader is not None and index in kv.reader.layers:
                kept.append(x if residual is None else residual + x)
            x, residual = layer(x, residual, step)
        hidden = x if residual is None else residual + x
        if self.streams is not None:
            return hidden if self.comm.stage < self.comm.stages - 1 else self.streams.together(hidden)
        if kv.reader is not None:
            kept += [hidden] * (len(self.layers) in kv.reader.layers)
            kv.reader.write(torch.stack(kept, 1), batch.write_index)
        return hidden

    def _changed(self, x: Tensor, tokens: Tensor, lora: LoraContext | None) -> Tensor:
        """The tokens' rows of the embedding [T, hidden_size], as the first layer reads them."""
        if lora is not None:
            lora.embed(tokens, x)
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden_size], or this rank's rows of it, see `forward_share`. Each token's row comes
        from the rank that has it."""
        if self.comm.size == 1:
            return self.embedding(tokens)
        start, stop = self._vocabulary
        elsewhere = (tokens < start) | (tokens >= stop)
        x = self.embedding((tokens - start).masked_fill_(elsewhere, 0))
        x.masked_fill_(elsewhere[:, None], 0)
        if self._own_rows is None:
            return self.comm.all_reduce(x)
        return self.comm.reduce_scatter(x, self._own_rows.counts)

    def _forward_fused(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        adapters: LoraStep | None,
        overlap: Callable[[], None] | None,
    ) -> Tensor:
        assert self._fused is not None
        if (sums := self.comm.sums) is not None:
            inputs = self._embed(tokens)
            return self._fused.forward(
                tokens, positions, kv.data, batch, adapters, overlap, sums=sums, inputs=inputs
            )
        if kv.reader is None:
            return self._fused.forward(tokens, positions, kv.data, batch, adapters, overlap)
        layers = kv.reader.layers
        values = torch.empty(len(tokens), len(layers), self.config.hidden_size)
        hidden = self._fused.forward(
            tokens, positions, kv.data, batch, adapters, overlap, Tapped(layers, values)
        )
        kv.reader.write(values, batch.write_index)
        return hidden

    def plan(self, kv: KVCache, batch: AttentionBatch) -> dict[int, AttentionPlan]:
        """Attention by layer, planned once for all layers of one shape."""
        plans = {
            (heads, spec): self._attention.plan(
                batch,
                AttentionShape(
                    heads,
                    spec.heads,
                    spec.head_dim,
                    kv.page_size,
                    self.dtype,
                    spec.dtype or kv.dtype,
                ),
            )
            for heads, spec in {
                shape for layer, shape in self._attending.items() if layer not in self._scores
            }
        }
        changed = self._plain_attention.planned(batch) if self._scores else None
        return {
            layer: changed(self._scores[layer])
            if changed is not None and layer in self._scores
            else plans[shape]
            for layer, shape in self._attending.items()
        }

    def logits(
        self, hidden: Tensor, lora: LoraOutput | None = None, logit_mask: Tensor | None = None
    ) -> Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> [S, vocab_size] float32, valid until the next call.
        A later stage has no logits: [S, 0]. `logit_mask`: see `FusedDecoder.logits`."""
        if self.comm.stage:
            return torch.empty(len(hidden), 0, device=self.device)
        if self._fused is not None:
            if self.comm.size == 1:
                logits = self._fused.logits(hidden, logit_mask)
            else:  # only the first rank has the mask
                logits = self.comm.all_gather(self._fused.logits(hidden), self.vocabulary_widths)
        else:
            logits = self.comm.all_gather(self.output(self.norm(hidden)).float(), self.vocabulary_widths)
        if lora is not None:
            lora.output(self.norm(hidden.to(self.dtype)), logits)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def hidden_states(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> the same after the final norm, [S, hidden_size]
        float32."""
        return self.norm(hidden.to(self.dtype)).float()

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the parameter or the part of a merged one to fill), with Hugging Face names."""
        first = not self.comm.stage
        if first:
            yield f"{EMBEDDING}.weight", self.embedding.weight
        for layer in self.layers:
            yield from layer.tensors()
        if first:
            yield from self.norm.tensors(self.config.final_norm)
        if self.per_layer is not None:
            yield from self.per_layer.tensors()
        if self.streams is not None:
            yield from self.streams.tensors()
        if first and self._own_output:
            yield from self.output.tensors()

    def shards(self) -> dict[str, Shard]:
        """This rank's part of each tensor of which it has only a part, by checkpoint name."""
        found = dict(self.output.shards())
        if found:
            found[f"{EMBEDDING}.weight"] = Shard(OUTPUTS, (self._vocabulary,))
        for layer in self.layers:
            found.update(layer.shards())
        if self.per_layer is not None:
            found.update(self.per_layer.shards())
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters, and of the slots for experts that may come."""
        weight = self.output.method.weight
        own = isinstance(weight, QuantizedWeight) and weight is not self.embedding.weight
        copied = weight.nbytes if own and not self._own_output else 0
        spare = sum(layer.experts.spare_bytes for layer in self.layers if layer.experts is not None)
        return copied + spare + sum(tensor.nbytes for _, tensor in self.tensors())

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a decode step."""
        return all(block.capturable for layer in self.layers for block in layer.blocks)

    def packed_layout(self) -> PackedLayout | None:
        """How `pack` would lay the linear modules out in one place; None if each packs its own, or if it has
        only a rank's part of them."""
        weights = None if self.comm.size > 1 else self._weights()
        return None if weights is None else packed_layout(weights)

    def unpacked(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, the parameter) of those that `pack` leaves as they are."""
        packed = {f"{name}.weight" for linear in self._linears() for name in linear.names}
        packed |= {f"{EMBEDDING}.weight"} if self.embedding.in_bits else set()
        for name, tensor in self.tensors():
            if name not in packed:
                assert isinstance(tensor, Tensor)
                yield name, tensor

    def pack(self, place: PackedPlace | None = None) -> None:
        """Packs the weights for this machine. Call it once, after all tensors are filled.

        If the device's backend runs all layers in one call, it takes the weights over. Otherwise each linear
        module packs its own. `place`: see `packed_layout`; if that is filled, the linear modules need not be.
        """
        norms = [norm for layer in self.layers for norm in layer.norms()]
        for norm in norms if self.comm.stage else (self.norm, *norms):
            norm.finish()
        if self.per_layer is not None:
            self.per_layer.norm.finish()
            self.per_layer.table.pack()
        if place is None or not place.filled:
            for linear in self._linears():
                linear.method.loaded()
        weights = self._weights()

        def hand_over(number: int, packed: tuple[PackedLinear, ...]) -> None:
            own = iter(packed)
            for linear in self.layers[number].linears():
                linear.hand_over(own)

        self._fused = None if weights is None else fuse(weights, place, hand_over)
        if self._fused is None:
            shared = self.output.method.weight is self.embedding.weight
            for linear in self._linears():
                linear.pack()
            if shared and self.embedding.in_bits and self.output.packed is not None:
                self.embedding.hand_over(self.output.packed)
            elif not self.comm.stage:
                self.embedding.pack()
            return
        self.output.hand_over(iter((self._fused.output,)))
        if self._fused.embedding is not None:
            self.embedding.hand_over(self._fused.embedding)

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from layer.linears()
        if self.per_layer is not None:
            yield self.per_layer.projection
        if self.streams is not None:
            yield from self.streams.linears()
        if not self.comm.stage:
            yield self.output

    def _weights(self) -> DecoderWeights | None:
        """The whole decoder, or a rank's part of each layer, as tensors; None if `kernels/decoder.py` does
        not support it, or if it has only some of the layers."""
        comm = self.comm
        if comm.stages > 1 or (comm.size > 1 and comm.sums is None) or comm.attention_ranks:
            return None
        config, layers = self.config, [layer.weights() for layer in self.layers]
        shapes = {*self._attending.values()}
        sizes = {layer.mlp.down.weight.shape for layer in layers if layer and layer.mlp and not layer.experts}
        scaled = {config.embedding_scale, config.logits_scale} != {1.0}
        other = config.norm != "rms" or config.output_bias or config.logits_softcap is not None
        if None in layers or len(shapes) != 1 or len(sizes) > 1 or scaled or other:
            return None
        assert isinstance(self.norm, RMSNorm)
        heads, spec = shapes.pop()
        return DecoderWeights(
            self.dtype,
            self.embedding.weight,
            _EachLayer(self.layers),
            self.norm.weight,
            self.output.weights.weight,
            heads,
            spec.heads,
            spec.head_dim,
            config.eps,
            self.comm.rank,
        )


class _EachLayer:
    """The weights of the layers, each made when it is asked for: once a backend has packed a layer, its plain
    weights are freed before the next one's are packed."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def __iter__(self) -> Iterator[LayerWeights]:
        for layer in self._layers:
            weights = layer.weights()
            assert weights is not None
            yield weights
