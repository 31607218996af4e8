"""Reads the adapters that a server starts with."""

from collections.abc import Mapping
from pathlib import Path

from personae.errors import AdapterError
from personae.lora.adapter import Adapter
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes


def read_start_adapters(folders: Mapping[str, Path], shapes: LoraShapes) -> dict[str, Adapter]:
    """The adapters by name. Raises AdapterError that names the folder, since there may be many."""
    adapters = {}
    for name, folder in folders.items():
        try:
            adapters[name] = read_adapter(folder, shapes)
        except AdapterError as error:
            raise AdapterError(f"adapter {folder}: {error.message}") from error
    return adapters
