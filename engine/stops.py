"""Stop strings in text that comes in pieces."""

from collections.abc import Iterable


class StopFinder:
    """Finds the first complete stop string in text that comes in pieces.

    Of several that are complete at the same character, the longest counts. Each stop string has a
    Knuth-Morris-Pratt matcher: after each character it knows how much of its string the text ends with. The
    longest of these may become a stop string and is held back.
    """

    __slots__ = ("_held", "_include_stop", "_matched", "_patterns", "found")

    def __init__(self, stops: Iterable[str], include_stop: bool) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in dict.fromkeys(stops) if stop]
        self._include_stop = include_stop
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take more text. Returns the text that can no longer become part of a stop string. Not to be called
        after `found`."""
        if not self._patterns:
            return text
        for place, char in enumerate(text):
            self.found = self._step(char)
            if self.found is not None:
                seen = self._held + text[: place + 1]
                self._held = ""
                return seen if self._include_stop else seen[: -len(self.found)]
        seen = self._held + text
        keep = len(seen) - max(self._matched)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """The text has ended: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advance by one character. Returns the longest stop string that it completes."""
        longest = ""
        for index, (stop, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched]
            matched += stop[matched] == char
            self._matched[index] = matched
            if matched == len(stop):
                longest = max(longest, stop, key=len)
        return longest or None


def _borders(stop: str) -> list[int]:
    """borders[n]: the length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length]
        length += stop[length] == char
        borders.append(length)
    return borders
