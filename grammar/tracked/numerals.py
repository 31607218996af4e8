"""Regular expressions for numbers of which each has only one spelling.

At most 15 digits, so that no two of them are the same double.
"""

from collections.abc import Iterator

_MOST = 10**15 - 1
_MOST_BEFORE_POINT = 10**9 - 1
_FRACTION = r"\.[0-9]{0,5}[1-9]"


def integers(low: int | None, high: int | None) -> str | None:
    """Those from `low` to `high`. None if there are none."""
    parts = []
    if high is None or high >= 0:
        parts += _range(max(low or 0, 0), _MOST if high is None else min(high, _MOST))
    if low is None or low < 0:
        least, most = max(-(high if high is not None else -1), 1), _MOST if low is None else min(-low, _MOST)
        parts += [f"-{one}" for one in _range(least, most)]
    return "|".join(parts) or None


def fractions(low: int | None, high: int | None) -> str | None:
    """Those between `low` and `high` that are not whole, with at most nine digits before the point and six
    behind it. None if there are none."""
    parts = []
    if high is None or high > 0:
        most = _MOST_BEFORE_POINT if high is None else min(high - 1, _MOST_BEFORE_POINT)
        parts += [f"(?:{one}){_FRACTION}" for one in _range(max(low or 0, 0), most)]
    if low is None or low < 0:
        most = _MOST_BEFORE_POINT if low is None else min(-low - 1, _MOST_BEFORE_POINT)
        least = max(-high, 0) if high is not None else 0
        parts += [f"-(?:{one}){_FRACTION}" for one in _range(least, most)]
    return "|".join(parts) or None


def _range(low: int, high: int) -> list[str]:
    """Expressions for the numbers from `low` to `high`, neither negative, one for each length."""
    found = []
    while low <= high:
        most = min(high, 10 ** len(str(low)) - 1)
        found.append(_same_length(str(low), str(most)))
        low = most + 1
    return found


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    parts = list(_by_first_digit(low, high))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _by_first_digit(low: str, high: str) -> Iterator[str]:
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        yield f"{first}{_same_length(low[1:], high[1:])}"
        return
    if low[1:] != "0" * rest:
        yield f"{first}{_same_length(low[1:], '9' * rest)}"
        first += 1
    whole = high[1:] == "9" * rest
    if first <= last - (not whole):
        yield f"{_digits(first, last - (not whole))}{_any(rest)}"
    if not whole:
        yield f"{last}{_same_length('0' * rest, high[1:])}"


def _digits(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _any(count: int) -> str:
    return "" if not count else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"
