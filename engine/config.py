"""What the decoder needs to know of a model, in one form for all families."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import KVSpec, LayerSpec
from personae.engine.layers.dense_and_experts import DenseAndExpertsSpec, experts_of, with_expert_groups
from personae.engine.layers.parallel import ParallelSpec
from personae.engine.parallel.expert_placement import NO_GROUPS, ExpertGroups
from personae.errors import LoadError
from personae.lora.shards import Shard
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    `max_position` is the longest context in tokens, with rope scaling. `layer_specs`: the blocks of each
    layer. `tie`: the output matrix is the embedding. `pre_norms`: the names of the norms of each half's input
    in a layer, None for none; twice the same name is one norm. `post_norms`: those of each half's output,
    before it is added. `parallel`: both halves read the same residual stream. `norm`: their kind and that of
    the `final_norm`; `norm_bias`: they have one. `norm_offset` is added to the stored weights of norms.
    `output_bias`: the output matrix has one. `logits_softcap`: logits z become cap * tanh(z / cap).
    `embedding_scale` multiplies the embedding, `residual_scale` what each half of a layer adds to the
    residual stream, `logits_scale` the logits. `images`: the checkpoint also has a part for images.
    `mtp_layers`: how many layers it has that predict further tokens (multi-token prediction), which the
    decoder does without. `per_layer_embedding`: the size of a token's embedding for each layer, and how many
    tokens have one. `layer_scalars`: each layer's result is multiplied by a number. `dtype` is the
    checkpoint's dtype, None if the file does not say. `unadaptable`: why no adapter can be computed exactly,
    None if one can. `first_layer`: the number of the first layer, if these
    are the layers of a later stage.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    eps: float
    tie: bool
    layer_specs: tuple[LayerSpec, ...]
    pre_norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None
    parallel: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    final_norm: str = "model.norm"
    output_bias: bool = False
    logits_softcap: float | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    images: bool = False
    mtp_layers: int = 0
    per_layer_embedding: tuple[int, int] | None = None
    layer_scalars: bool = False
    dtype: str | None = None
    unadaptable: str | None = None
    first_layer: int = 0

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.layer_specs)

    @property
    def lora_sites(self) -> dict[str, LoraSite]:
        """The linear modules that adapters may change, by their short names. A module that has different
        shapes in different layers is left out."""
        found: dict[str, dict[int, LoraSite]] = {}
        for layer, spec in enumerate(self.layer_specs):
            for key, site in spec.lora_sites(self.hidden_size).items():
                found.setdefault(key, {})[layer] = site
        return {
            key: replace(next(iter(own.values())), layers=None if len(own) == self.layers else frozenset(own))
            for key, own in found.items()
            if len({*own.values()}) == 1
        }

    def of_rank(
        self, rank: int, size: int, expert_groups: ExpertGroups = NO_GROUPS, *, attention_ranks: int = 0
    ) -> "ModelConfig":
        """What a rank of `size` has of the layers. `expert_groups`: how they divide the experts.
        `attention_ranks`: see LayerSpec. Raises LoadError if the layers cannot be divided so."""
        if size == 1:
            return self
        divided = self if expert_groups.number == 1 else self._with_expert_groups(expert_groups)
        option, sharing = f"--tensor-parallel-size {size}", size
        if 0 < attention_ranks < size:
            option, sharing = f"--attention-ranks {attention_ranks} of {size}", size - attention_ranks
            blocks = (block for layer in self.layer_specs for block in layer.blocks)
            if any(isinstance(block, DenseAndExpertsSpec) for block in blocks):
                raise LoadError(
                    f"{option}: this model has layers with an MLP and experts beside it, whose results have "
                    "norms of their own; these have to be on the ranks that have attention."
                )
        if rank >= attention_ranks > 0:
            divided = replace(divided, per_layer_embedding=None)
        try:
            return divided.with_layers(
                lambda layer: layer.of_rank(rank, size, attention_ranks=attention_ranks)
            )
        except ValueError as error:
            they = f"{sharing} ranks cannot share equally"
            if sharing == 1:
                they = "cannot be on a rank without attention"
            raise LoadError(f"{option}: this model has {error}, which {they}.") from None

    def _with_expert_groups(self, groups: ExpertGroups) -> "ModelConfig":
        count, spare = groups.number, groups.spare or 0
        option = f"--expert-parallel-size {count}"
        experts = {found.experts for layer in self.layer_specs if (found := experts_of(layer)) is not None}
        if not experts:
            raise LoadError(f"{option}: this model has no experts.")
        for number in sorted(experts):
            if number % count or number < 2 * count:
                raise LoadError(
                    f"{option}: this model has {number} experts, which so many groups cannot share equally "
                    "with at least two for each."
                )
            if spare > number - number // count:
                raise LoadError(
                    f"--num-redundant-experts {spare * count}: this model has {number} experts, and a group "
                    f"that has {number // count} of them has no use for {spare} more."
                )
        return self.with_layers(lambda layer: with_expert_groups(layer, groups))

    def of_stage(self, stage: int, stages: int) -> "ModelConfig":
        """The layers of one of the stages: equally many, and where that is not possible the last stages have
        one more. Layers that read keys and values of others are in the last stage, with these others. Raises
        LoadError if a stage would have no layer."""
        bounds = [number * self.layers // stages for number in range(stages + 1)]
        read = [read for layer in self.layer_specs if (read := _layer_read(layer)) is not None]
        if read and bounds[-2] > (first_read := min(read)):
            bounds = [number * first_read // (stages - 1) for number in range(stages)] + [self.layers]
        if any(first == stop for first, stop in pairwise(bounds)):
            last = f", {self.layers - min(read)} of which belong to the last stage" if read else ""
            raise LoadError(
                f"--pipeline-parallel-size {stages}: this model has {self.layers} layers{last}, and each "
                "stage needs one."
            )
        first, stop = bounds[stage], bounds[stage + 1]
        layers = (_numbered_from(first, layer) for layer in self.layer_specs[first:stop])
        return replace(self, layer_specs=tuple(layers), first_layer=first)

    @property
    def shards(self) -> dict[str, Shard]:
        """The rank's parts of the linear modules that adapters may change, by their short names."""
        return {key: shard for layer in self.layer_specs for key, shard in layer.shards().items()}

    @property
    def kv_specs(self) -> tuple[KVSpec | None, ...]:
        """What each layer keeps of every token, and then, if some layers have two blocks that keep something,
        what the second one does."""
        attentions = [layer.attention for layer in self.layer_specs]
        second = [each.second.kv if isinstance(each, ParallelSpec) else None for each in attentions]
        first = (each.kv for each in attentions)
        return (*first, *second) if any(second) else (*first,)

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> "ModelConfig":
        """A copy with changed layers."""
        return replace(self, layer_specs=tuple(map(change, self.layer_specs)))


def _layer_read(layer: LayerSpec) -> int | None:
    """The other layer whose keys and values a layer reads, if it does."""
    return layer.attention.reads if isinstance(layer.attention, AttentionSpec) else None


def _numbered_from(first: int, layer: LayerSpec) -> LayerSpec:
    """The layer, as layers have their numbers in a stage that begins with layer `first`."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.reads is None:
        return layer
    return replace(layer, attention=replace(attention, reads=attention.reads - first))
