"""Does an adapter fit? Uploads and loads are asked the same."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from personae.errors import AdapterError
from personae.kernels.sgmv import RANK_PAGE
from personae.kernels.sizes import size_text
from personae.lora import peft_vocabulary
from personae.lora.adapter import Adapter, LoraShapes
from personae.lora.peft import tensor_name
from personae.lora.single import magnitude
from personae.lora.weight_pools import pool_bytes

MAX_UPDATE = math.sqrt(torch.finfo(torch.float32).max)
MAX_RANK = 512  # of one adapter's module: kernels size their scratch memory by it


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What an adapter must fit: the base's shapes, the pool's ranks, its dtype's magnitudes, the bytes for
    what it has in addition to its ranks. stored: the dtype (safetensors' name) of the file from which it is
    placed, if there is one (`lora/stored.py`)."""

    shapes: LoraShapes
    max_rank: int
    max_value: float
    max_extra: int = 2**63
    stored: str | None = None

    @classmethod
    def of_pool(
        cls, shapes: LoraShapes, capacity_rows: int, dtype: torch.dtype, stored: str | None = None
    ) -> Self:
        """Those of a LoraPool of this size."""
        memory = pool_bytes(shapes, capacity_rows, dtype)
        return cls(shapes, min(capacity_rows, MAX_RANK), torch.finfo(dtype).max, memory, stored)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError if the adapter could never be placed."""
        for module, rank in adapter.ranks.items():
            if rank > self.max_rank:
                raise AdapterError(f"rank {rank} of {module}: {self._most_ranks(rank)}", param="r")
        if adapter.extra_bytes(self.shapes) > self.max_extra:
            extra = size_text(adapter.extra_bytes(self.shapes), needed=True)
            raise AdapterError(
                f"{', '.join(adapter.traits())}: that needs {extra} in addition to the ranks; the server has "
                f"{size_text(self.max_extra)}. Start the server with --adapter-memory {extra} or more"
            )
        if not (adapter.peak <= self.max_value and adapter.reach <= self.max_update):
            raise self._overflow(adapter)

    def _most_ranks(self, rank: int) -> str:
        """Why a rank is too large, and which memory it would need."""
        if rank > MAX_RANK:
            return f"{MAX_RANK} is the most that is served"
        pages = -(-rank // RANK_PAGE)
        needed = pages * RANK_PAGE * self.max_extra // self.max_rank  # a rank's bytes do not depend on others
        return (
            f"the memory for adapters holds {self.max_rank} ranks; start the server with "
            f"--adapter-memory {size_text(needed, needed=True)} or more"
        )

    @property
    def max_update(self) -> float:
        """The most that an entry of scaling * B A may reach: the dtype has it, and float32 its square, which
        norms are made of."""
        return min(self.max_value, MAX_UPDATE)

    def _overflow(self, adapter: Adapter) -> AdapterError:
        """What is too large, by its tensor."""
        for name, value in _peaks(adapter, self.shapes):
            if not value <= self.max_value:
                return self._out_of_range(f"{name!r}: its", value, name)
        for name, value in _reaches(adapter, self.shapes):
            if not value <= self.max_update:
                return AdapterError(
                    f"{name!r}: its product with lora_A may reach {value:.3g} with the scaling, which is "
                    "out of the range that the server computes in",
                    param=name,
                )
        return self._out_of_range("the", adapter.peak)  # of one that is in its file

    def _out_of_range(self, whose: str, value: float, name: str | None = None) -> AdapterError:
        return AdapterError(
            f"{whose} largest value, {value:.3g} with the scaling, is out of the range of the precision that "
            "the server computes in",
            param=name,
        )


def _peaks(adapter: Adapter, shapes: LoraShapes) -> Iterator[tuple[str, float]]:
    """Each tensor's largest magnitude, with the scaling, by PEFT's name."""
    for (layer, module), pair in adapter.pairs.items():
        for role, value in zip("AB", pair.peaks(), strict=True):
            yield tensor_name(layer, module, role, shapes), value
    for (layer, module), dora_bias in adapter.dora_bias.items():
        for role, tensor in dora_bias.tensors():
            yield tensor_name(layer, module, role, shapes), magnitude(tensor)
    for change in adapter.vocabulary:
        for role, tensor in change.tensors():
            if role != "ids":
                yield peft_vocabulary.tensor_name(change, role), magnitude(tensor)


def _reaches(adapter: Adapter, shapes: LoraShapes) -> Iterator[tuple[str, float]]:
    """What no entry of each update exceeds, by PEFT's name of its B."""
    for (layer, module), pair in adapter.pairs.items():
        yield tensor_name(layer, module, "B", shapes), pair.reach()
    for change in adapter.vocabulary:
        if reach := change.reach():
            yield peft_vocabulary.tensor_name(change, "b"), reach
