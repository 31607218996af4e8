"""The shapes of a base that adapters must fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from personae.lora.sites import LoraSite


class Fingerprint(NamedTuple):
    """sha256 of a matrix rounded to bfloat16, and of one rounded to float16. Two are needed: each dtype loses
    values that the other keeps."""

    bfloat16: str
    float16: str

    def matches(self, other: "Fingerprint | None") -> bool:
        """Whether the matrices are equal but for the rounding of a copy."""
        return other is not None and any(map(str.__eq__, self, other))


@dataclass(frozen=True, slots=True)
class LoraShapes:
    """What an adapter must fit: the base's number of layers, and the modules of a layer, by short names.

    vocabulary: (tokens, hidden size), None if the embedding and the output matrix cannot be changed. tied:
    the output matrix is the embedding. copies: fingerprints of the base's own "embedding" and "output", which
    identify copies of them in a file. refusal: why the base has no adapters, None if it has.
    """

    layers: int
    sites: Mapping[str, LoraSite]
    vocabulary: tuple[int, int] | None = None
    tied: bool = False
    copies: Mapping[str, Fingerprint] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each module of a layer."""
        return {key: (site.inputs, site.outputs) for key, site in self.sites.items()}

    @property
    def shared(self) -> dict[str, tuple[int, int]]:
        """The `modules` that are not experts. The pool has the same number of ranks for each of them."""
        return {key: (site.inputs, site.outputs) for key, site in self.sites.items() if site.experts == 1}

    def without_experts(self) -> "LoraShapes":
        """The shapes without the modules of experts."""
        return replace(self, sites={key: site for key, site in self.sites.items() if site.experts == 1})

    def has(self, layer: int, module: str) -> bool:
        """Whether the layer has the module."""
        layers = self.sites[module].layers
        return layers is None or layer in layers

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The modules that read the same input, one SGMV call each."""
        return _grouped_by(self.sites, lambda site: site.group)

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The modules of each path in the base's files, in the order of their outputs."""
        return _grouped_by(self.sites, lambda site: site.path)

    def parts(self, layer: int, path: str) -> tuple[str, ...]:
        """The modules of a path in a layer. Layers may have different ones there."""
        return tuple(key for key, site in self.sites.items() if site.path == path and self.has(layer, key))

    @property
    def merged(self) -> bool:
        """Whether the base's files have several modules as one."""
        return any(
            len(self.parts(layer, path)) > 1
            for path, modules in self.paths.items()
            if len(modules) > 1
            for layer in range(self.layers)
        )


def _grouped_by(sites: Mapping[str, LoraSite], name: Callable[[LoraSite], str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key, site in sites.items():
        found[name(site)] = (*found.get(name(site), ()), key)
    return found
