"""How the long lists of an answer are kept until it is sent: as lists, or already as JSON.

Log-probabilities of prompts are hundreds of thousands of small objects. When packed, those of each place
become JSON as soon as they are made. So there are never many at once, and encoding the rest takes no time.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

Pack = Callable[[Iterable[Any]], Any]

_encode = msgspec.json.Encoder().encode


def as_list(items: Iterable[Any]) -> Any:
    """A list."""
    return list(items)


def as_json(items: Iterable[Any]) -> Any:
    """A value that encodes to the same as the list."""
    return msgspec.Raw(b"[" + b",".join(map(_encode, items)) + b"]")
