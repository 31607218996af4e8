"""The decoder's weights, for adapters that depend on them (`lora/base.py`)."""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.engine.models.decoder import Decoder
from personae.lora.base import Site, chunks
from personae.lora.shards import OUTPUTS


class DecoderBaseWeights:
    """A decoder as `BaseWeights`. Norms are cached."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._sites = dict(_sites(model))
        self._squares: dict[Site, Tensor] = {}

    def squares(self, site: Site) -> Tensor:
        """See BaseWeights."""
        if site not in self._squares:
            model = self._model
            if site == "embedding":
                parts = (chunk.float().square().sum(0) for chunk in chunks(model.embedding.plain()))
                self._squares[site] = model.comm.all_reduce(torch.stack(list(parts)).sum(0).cpu())
            else:
                linear, rows = self._find(site)
                weight = linear.plain()[rows]
                parts = (chunk.float().square().sum(1) for chunk in chunks(weight))
                self._squares[site] = self._of_all(site, torch.cat(list(parts)).cpu())
        return self._squares[site]

    def project(self, site: Site, a: Tensor) -> Tensor:
        """See BaseWeights."""
        model = self._model
        given = a.to(model.device, model.dtype)
        if site == "embedding":
            own = torch.split(given, model.vocabulary_widths, 1)[model.comm.rank]
            return model.comm.all_reduce((own @ model.embedding.plain()).float().cpu())
        linear, rows = self._find(site)
        found = linear.project(given)[:, rows].float().cpu()
        bias = None if linear.bias is None else linear.bias[rows].float().cpu()
        return self._of_all(site, found if bias is None else found - bias)

    def total(self, site: Site, squares: Tensor) -> Tensor:
        """See BaseWeights."""
        shard = None if isinstance(site, str) else self._model.config.shards.get(site[1])
        return (
            squares if shard is None or shard.dim == OUTPUTS else self._model.comm.sharing.all_reduce(squares)
        )

    def everywhere(self, good: bool) -> bool:
        """See BaseWeights."""
        return not self._model.comm.sharing.all_reduce(torch.tensor([0.0 if good else 1.0])).item()

    def name(self, site: Site) -> str:
        """See BaseWeights."""
        return site if isinstance(site, str) else f"{(site[0] + self._model.config.first_layer, site[1])}"

    def bias(self, site: Site) -> Tensor | None:
        """See BaseWeights."""
        if site == "embedding":
            return None
        linear, rows = self._find(site)
        return None if linear.bias is None else self._of_all(site, linear.bias[rows].float().cpu())

    def _of_all(self, site: Site, part: Tensor) -> Tensor:
        """All ranks' parts of what has an entry per token; `part` [..., outputs] for other sites."""
        if site != "output":
            return part
        widths = self._model.vocabulary_widths
        return self._model.comm.all_gather(part.view(-1, part.shape[-1]), widths).view(*part.shape[:-1], -1)

    def _find(self, site: Site) -> tuple[Linear, slice]:
        """The merged matrix that has the module, and the module's rows in it."""
        return (self._model.output, slice(None)) if isinstance(site, str) else self._sites[site]


def _sites(model: Decoder) -> Iterator[tuple[Site, tuple[Linear, slice]]]:
    for index, layer in enumerate(model.layers):
        for modules, linear in layer.lora_linears():
            ends = list(accumulate(linear.outputs))
            for module, size, end in zip(modules, linear.outputs, ends, strict=True):
                yield (index, module), (linear, slice(end - size, end))
