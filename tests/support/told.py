"""A stand-in for a `Ref`: keeps what it is told, in order."""

from typing import Any


class Told(list[Any]):
    """`tell` appends."""

    tell = list.append
