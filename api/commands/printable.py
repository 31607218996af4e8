"""Text of a model for a terminal: no character of it can steer the terminal or hide other text."""

import sys
import unicodedata

_KEPT = "\n\t"
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]
_SHOWN = "\N{REPLACEMENT CHARACTER}"


def _steering() -> dict[int, str]:
    """What is replaced: control characters, separators of lines, what changes the direction of writing, and
    halves of surrogate pairs."""
    kinds = ("Cc", "Zl", "Zp", "Cs")
    codes = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in kinds]
    return dict.fromkeys([code for code in [*codes, *_BIDI] if chr(code) not in _KEPT], _SHOWN)


_TABLE = _steering()


def printable(text: str) -> str:
    """The text, in which only line ends and tabs have an effect."""
    return text.translate(_TABLE)
