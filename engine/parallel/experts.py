"""The experts that a rank has, while they move between ranks."""

from collections.abc import Iterator

from safetensors import SafetensorError

from personae.engine.model_files import ModelFiles
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.expert_placement import LayerExperts, Placement
from personae.errors import ModelLoadError


class RankExperts:
    """The ExpertMemory of this process. `files`: where the weights of experts are read."""

    def __init__(self, model: Decoder, files: ModelFiles) -> None:
        self._files = files
        self._blocks = {
            model.config.first_layer + number: layer.experts
            for number, layer in enumerate(model.layers)
            if layer.experts is not None
        }

    def layers(self) -> dict[int, LayerExperts]:
        """See ExpertMemory."""
        found = {}
        for layer, block in self._blocks.items():
            assert block.loads is not None
            assert block.slots is not None
            found[layer] = LayerExperts(block.loads.tolist(), block.slots.placement)
            block.loads.zero_()
        return found

    def reading(self, layer: int, placement: Placement) -> Iterator[None]:
        """See ExpertMemory."""
        if layer not in self._blocks:
            return
        self._files.check()
        try:
            yield from self._blocks[layer].reading(placement, self._files.stored)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"an expert cannot be read: {error}") from error
        self._files.check()

    def place(self, layer: int, placement: Placement) -> None:
        """See ExpertMemory."""
        if layer in self._blocks:
            self._blocks[layer].place(placement)
