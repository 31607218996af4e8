"""Numbers for readers, and where two texts differ."""

import difflib
import math
import re

from markupsafe import Markup, escape

from personae.api.eval_reports.statistics import Interval

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
LONGEST_DIFF = 3000  # characters; a comparison of longer texts takes too long and does not help


def percent(share: Interval | None) -> str:
    """`93.8`, or a dash."""
    return "–" if share is None or math.isnan(share.share) else f"{100 * share.share:.1f}"


def interval(share: Interval | None) -> str:
    """`85–98`, or an empty text."""
    return "" if share is None or math.isnan(share.share) else f"{100 * share.low:.0f}–{100 * share.high:.0f}"


def quantity(value: float | None) -> str:
    """Rounded to four digits."""
    return "–" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`0.31 s`, `48 s`, `3:05 min`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)}:{int(seconds % 60):02} min"


def marked(text: str, other: str) -> Markup:
    """The text, with `<mark>` around the parts that `other` lacks there."""
    if not other or len(text) + len(other) > LONGEST_DIFF:
        return escape(text)
    words, others = _WORDS.findall(text), _WORDS.findall(other)
    pieces = []
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        piece = escape("".join(words[start:end]))
        pieces.append(piece if kind == "equal" or not piece else Markup("<mark>{}</mark>").format(piece))
    return Markup("").join(pieces)
