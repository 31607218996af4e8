"""Lists of names in error messages."""

from collections.abc import Iterable

_LISTED = 40  # most names in one error message


def listing(names: Iterable[str]) -> str:
    """Names for a message: the first ones, and how many more."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
