"""The identity of a mix of several adapters, which names its parts."""

from collections.abc import Iterable

_PREFIX = "mix:"

MixPart = tuple[str, float]
"""An adapter's digest and its weight."""


def mix_id(parts: Iterable[MixPart]) -> str:
    """The identity of a mix. The order of its parts does not matter."""
    return _PREFIX + ",".join(f"{digest}*{float(weight)!r}" for digest, weight in sorted(parts))


def parts_of(id: str) -> list[MixPart] | None:
    """The parts of a mix; None if the identity is that of a plain adapter."""
    if not id.startswith(_PREFIX):
        return None
    pairs = (part.partition("*") for part in id.removeprefix(_PREFIX).split(","))
    return [(digest, float(weight)) for digest, _, weight in pairs]
