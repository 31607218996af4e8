"""Names in error messages."""

from collections.abc import Iterable

_LISTED = 40  # names in one error message


def listing(names: Iterable[str]) -> str:
    """Names for a message; of many, the first."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
