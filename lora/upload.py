"""Checks an uploaded adapter against the base, and writes the file from which it will be placed."""

from pathlib import Path

from personae.lora.adapter import Adapter
from personae.lora.bounds import AdapterBounds
from personae.lora.disk import bytes_in
from personae.lora.fit import check_fit
from personae.lora.peft import read_adapter
from personae.lora.stored import store, stored_bytes
from personae.lora.summary import AdapterSummary
from personae.lora.throttle import Throttle


def check_upload(folder: Path, bounds: AdapterBounds, most: int | None) -> AdapterSummary:
    """Read all of an uploaded adapter. The file from which it is placed is written, unless the folder would
    then have more than `most` bytes; the file has all layers even if only one has ranks.

    Raises AdapterError, with the field or tensor as `param`, if the server cannot serve the adapter.
    """
    throttle, shapes, kind = Throttle(), bounds.shapes, bounds.stored
    adapter = read_adapter(folder, shapes, throttle.rest)
    check_fit(adapter, bounds)
    if kind is not None:
        size = bytes_in(folder) + stored_bytes(adapter, shapes, kind)
        if most is not None and size > most:
            return _summary(adapter, size)
        store(adapter, folder, shapes, kind, throttle.rest)
    return _summary(adapter, bytes_in(folder))


def _summary(adapter: Adapter, size: int) -> AdapterSummary:
    return AdapterSummary(adapter.digest, dict(adapter.ranks), adapter.traits(), adapter.invocation, size)
