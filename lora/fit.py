"""Checks whether an adapter fits. Uploads and loads use the same checks."""

from collections.abc import Iterator

import torch

from personae.errors import AdapterError
from personae.kernels.sgmv import RANK_PAGE
from personae.kernels.sizes import size_text
from personae.lora import peft_vocabulary
from personae.lora.adapter import Adapter
from personae.lora.bounds import AdapterBounds
from personae.lora.peft_names import tensor_name
from personae.lora.shapes import LoraShapes
from personae.lora.single import magnitude
from personae.lora.weight_pools import adapter_bytes, pool_bytes

MAX_RANK = 512  # per module of an adapter; kernels size their scratch memory by it


def bounds_of_pool(
    shapes: LoraShapes,
    capacity_rows: int,
    dtype: torch.dtype,
    stored: str | None = None,
    max_adapters: int = 2**31,
) -> AdapterBounds:
    """The bounds of a LoraPool of this size."""
    memory = pool_bytes(shapes, capacity_rows, dtype)
    top = torch.finfo(dtype).max
    return AdapterBounds(
        shapes,
        min(capacity_rows, MAX_RANK),
        top,
        memory,
        stored,
        dtype.itemsize,
        capacity_rows,
        max_adapters,
        RANK_PAGE,
    )


def check_fit(adapter: Adapter, bounds: AdapterBounds) -> None:
    """Raises AdapterError if the adapter can never be placed."""
    for module, rank in adapter.ranks.items():
        if module not in bounds.shapes.sites:
            raise AdapterError(
                "LoRA on experts needs memory that the KV cache can lend; this device has none"
            )
        own = rank // adapter.experts.get(module, 1)
        if own > bounds.max_rank:
            raise AdapterError(f"rank {own} of {module}: {_most_ranks(own, bounds)}", param="r")
    if adapter.experts and adapter_bytes(bounds.shapes, adapter.ranks, bounds.itemsize) > bounds.max_extra:
        raise too_large(adapter, bounds)
    if adapter.extra_bytes(bounds.shapes) > bounds.max_extra:
        extra = size_text(adapter.extra_bytes(bounds.shapes), needed=True)
        raise AdapterError(
            f"{', '.join(adapter.traits())}: this needs {extra} in addition to the ranks; the server has "
            f"{size_text(bounds.max_extra)}. Start the server with --adapter-memory {extra} or more"
        )
    if not (adapter.peak <= bounds.max_value and adapter.reach <= bounds.max_update):
        raise _overflow(adapter, bounds)


def too_large(adapter: Adapter, bounds: AdapterBounds) -> AdapterError:
    """The error for an adapter whose experts need more than all memory for adapters."""
    needed = size_text(adapter_bytes(bounds.shapes, adapter.ranks, bounds.itemsize), needed=True)
    return AdapterError(
        f"its ranks on experts need {needed}; the memory for adapters has {size_text(bounds.max_extra)}. "
        f"Start the server with --adapter-memory {needed} or more"
    )


def _most_ranks(rank: int, bounds: AdapterBounds) -> str:
    """Why a rank is too large, and how much memory it would need."""
    if rank > MAX_RANK:
        return f"the largest supported rank is {MAX_RANK}"
    pages = -(-rank // RANK_PAGE)
    needed = pages * RANK_PAGE * bounds.max_extra // bounds.max_rank  # every rank takes the same bytes
    return (
        f"the memory for adapters holds {bounds.max_rank} ranks; start the server with "
        f"--adapter-memory {size_text(needed, needed=True)} or more"
    )


def _overflow(adapter: Adapter, bounds: AdapterBounds) -> AdapterError:
    """The error that names the tensor that is too large."""
    for name, value in _peaks(adapter, bounds.shapes):
        if not value <= bounds.max_value:
            return _out_of_range(f"{name!r}: its", value, name)
    for name, value in _reaches(adapter, bounds.shapes):
        if not value <= bounds.max_update:
            return AdapterError(
                f"{name!r}: its product with lora_A may reach {value:.3g} with the scaling, which is "
                "outside the range of the server's precision",
                param=name,
            )
    return _out_of_range("the", adapter.peak)  # a stored adapter, whose tensors are in its file


def _out_of_range(whose: str, value: float, name: str | None = None) -> AdapterError:
    return AdapterError(
        f"{whose} largest value, {value:.3g} with the scaling, is outside the range of the server's "
        "precision",
        param=name,
    )


def _peaks(adapter: Adapter, shapes: LoraShapes) -> Iterator[tuple[str, float]]:
    """The largest magnitude of each tensor, with the scaling, by PEFT's name."""
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
    """An upper bound of the entries of each update, by PEFT's name of its B."""
    for (layer, module), pair in adapter.pairs.items():
        yield tensor_name(layer, module, "B", shapes), pair.reach()
    for change in adapter.vocabulary:
        if reach := change.reach():
            yield peft_vocabulary.tensor_name(change, "b"), reach
