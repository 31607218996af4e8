"""The linear modules of a layer that adapters may change."""

from collections.abc import Mapping
from dataclasses import dataclass

NAMES = {
    "q": ("self_attn.q_proj", "qkv"),
    "k": ("self_attn.k_proj", "qkv"),
    "v": ("self_attn.v_proj", "qkv"),
    "o": ("self_attn.o_proj", "o"),
    "gate": ("mlp.gate_proj", "gate_up"),
    "up": ("mlp.up_proj", "gate_up"),
    "down": ("mlp.down_proj", "down"),
}
"""The path in a layer, and the group, of the modules that nearly all families have."""
MERGED = {
    **dict.fromkeys("qkv", "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
"""Their paths in families that have q, k and v as one module, and gate and up as another."""
PROJECTIONS = {key: path for key, (path, _) in NAMES.items()}


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear module: [outputs, inputs].

    path: its name within a layer, in checkpoints and in PEFT; sites with the same path are one module there,
    one after the other. group: the sites that read the same input and share one SGMV call. experts: how many
    modules of this shape a layer has; more than 1 for those of a mixture of experts, whose path has "*" for
    the expert's number. alternate: where PEFT has the experts' gate and up as one parameter, their rows
    alternate. reversed: PEFT takes that parameter's inputs for its outputs, because transformers does not say
    which they are. layers: the layers that have it, None for all. reads_cache: it multiplies what the cache
    keeps of all earlier tokens, at each step again.
    """

    path: str
    group: str
    inputs: int
    outputs: int
    experts: int = 1
    alternate: bool = False
    reversed: bool = False
    layers: frozenset[int] | None = None
    reads_cache: bool = False


def sites(sizes: Mapping[str, tuple[int, int]], *, merged: bool = False) -> dict[str, LoraSite]:
    """The sites with these (inputs, outputs), by short names: q, k, v, o, gate, up, down."""
    return {
        key: LoraSite(MERGED.get(key, path) if merged else path, group, *sizes[key])
        for key, (path, group) in NAMES.items()
        if key in sizes
    }
