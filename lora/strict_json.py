"""Untrusted JSON: an object in UTF-8 with unique names. Anything else is an AdapterError."""

import json
from typing import Any

from personae.errors import AdapterError


def decode_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. The error's message begins with `where`. This begins with the file's name, which
    becomes the error's `param`."""
    file = where.partition(":")[0]
    try:
        decoded = json.loads(data.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{where}: not JSON: {error}", param=file) from None
    if not isinstance(decoded, dict):
        raise AdapterError(f"{where}: not a JSON object", param=file)
    return decoded


def _without_repeats(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("an object has the same name twice")
    return found
