"""Reads a model folder's `config.json`, strictly.

`ModelConfig` holds exactly what the decoder needs, in one form for all families and file versions. If a field
would change the model's arithmetic and is not understood, loading fails with its name. So a model that loads
is computed as its makers intended.

The fields are those of Hugging Face transformers, versions 4 (`rope_theta`, `rope_scaling`, `torch_dtype`)
and 5 (`rope_parameters`, `dtype`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from personae.engine.fields import Fields, read_fields
from personae.engine.layers.block import KVSpec, LayerSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.layers.parallel import ParallelSpec
from personae.engine.models import FAMILIES, MODEL_TYPES, family
from personae.engine.models.config_keys import check_unread
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
    checkpoint's dtype, None if the file does not say. `first_layer`: the number of the first layer, if these
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

    def of_rank(self, rank: int, size: int, expert_groups: int = 1) -> "ModelConfig":
        """What a rank of `size` has of the layers. `expert_groups`: how many groups of them have different
        experts. Raises LoadError if the layers cannot be divided so."""
        if size == 1:
            return self
        divided = self if expert_groups == 1 else self._with_expert_groups(expert_groups)
        try:
            return divided.with_layers(lambda layer: layer.of_rank(rank, size))
        except ValueError as error:
            raise LoadError(
                f"--tensor-parallel-size {size}: this model has {error}, which {size} ranks cannot share "
                "equally."
            ) from None

    def _with_expert_groups(self, count: int) -> "ModelConfig":
        option = f"--expert-parallel-size {count}"
        experts = {layer.mlp.experts for layer in self.layer_specs if isinstance(layer.mlp, MoeSpec)}
        if not experts:
            raise LoadError(f"{option}: this model has no experts.")
        for number in sorted(experts):
            if number % count or number < 2 * count:
                raise LoadError(
                    f"{option}: this model has {number} experts, which so many groups cannot share equally "
                    "with at least two for each."
                )
        return self.with_layers(
            lambda layer: (
                replace(layer, mlp=replace(layer.mlp, expert_groups=count))
                if isinstance(layer.mlp, MoeSpec)
                else layer
            )
        )

    def of_stage(self, stage: int, stages: int) -> "ModelConfig":
        """The layers of one of the stages: equally many, and where that is not possible the last stages have
        one more. Raises LoadError if there are more stages than layers."""
        if stages > self.layers:
            raise LoadError(
                f"--pipeline-parallel-size {stages}: this model has {self.layers} layers, and each stage "
                "needs one."
            )
        shared = any(getattr(layer.attention, "reads", None) is not None for layer in self.layer_specs)
        if stages > 1 and (shared or self.per_layer_embedding is not None):
            raise LoadError(
                f"--pipeline-parallel-size {stages}: this model has layers that read keys and values of "
                "others, or embeddings for each layer, which stages cannot share."
            )
        first, stop = (number * self.layers // stages for number in (stage, stage + 1))
        return replace(self, layer_specs=self.layer_specs[first:stop], first_layer=first)

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


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face model folder.

    Raises:
        ModelLoadError: a file or field is missing, malformed or not supported. The error names the field.
    """
    fields = read_fields(folder / "config.json")
    name = _architecture(fields)
    translate = family(name)
    if translate is None:
        raise fields.error(
            "architectures", f"{name!r} is not supported; supported are: {', '.join(FAMILIES)}"
        )
    config = translate(name, fields)
    check_unread(fields, name)
    return config


def _architecture(fields: Fields) -> str:
    """The architecture that the file names, or else the one of its `model_type`."""
    names, kind = fields.raw("architectures"), fields.raw("model_type")
    if names is None and kind is not None:
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise fields.error("model_type", f"{kind!r} is not supported without architectures, only {known}")
        return MODEL_TYPES[kind]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"expected a list of one name, found {names!r}")
    return names[0]
