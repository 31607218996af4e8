"""The blanks that an answer has between the parts of its JSON."""

BLANKS = b" \n\r\t"
_QUOTE, _BACKSLASH = b'"\\'
_SEPARATORS = b":,"
_BEGINNINGS = b'"{}[]:,-0123456789tfn'  # of parts; what begins otherwise is no JSON
_LONGEST = 256  # bytes of blanks that are remembered


class JsonBlanks:
    """Reads an answer, and says which blanks come next.

    It repeats the blanks that this answer last had between the same two parts. If it had none of these parts
    yet, it expects a space after a comma or a colon, as Python's `json.dumps` writes it. If the answer has no
    blank after one of these two signs, none is expected after the other.

    `last` is the last byte that is not a blank, `run` are the blanks after it. `within` says whether the
    answer is in a string.
    """

    __slots__ = ("_after", "_between", "_escaped", "last", "run", "within")

    def __init__(self) -> None:
        self._between: dict[tuple[int, int], bytes] = {}
        self._after: dict[int, bytes] = {}
        self._escaped = self.within = False
        self.last, self.run = 0, b""

    def copy(self) -> "JsonBlanks":
        """A second one in the same place."""
        other = JsonBlanks()
        other._between, other._after = self._between.copy(), self._after.copy()
        other._escaped, other.within = self._escaped, self.within
        other.last, other.run = self.last, self.run
        return other

    def read(self, text: bytes) -> None:
        """The answer goes on with this text."""
        for byte in text:
            if self.within:
                self._read_string(byte)
            elif byte in BLANKS:
                self.run = (self.run + bytes((byte,)))[:_LONGEST]
            else:
                if byte in _BEGINNINGS:
                    self._between[self.last, byte] = self.run
                    if self.last in _SEPARATORS:
                        self._after[self.last] = self.run
                self.last, self.run, self.within = byte, b"", byte == _QUOTE

    def _read_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == _BACKSLASH:
            self._escaped = True
        elif byte == _QUOTE:
            self.within = False

    def _usual(self) -> bytes:
        """The blanks after the separator that is there, whatever comes next."""
        if self.last in self._after:
            return self._after[self.last]
        return b"" if b"" in self._after.values() else b" "

    def missing(self, byte: int | None) -> bytes:
        """The blanks that are still missing before `byte`; None stands for an unknown byte."""
        wanted = None if byte is None else self._between.get((self.last, byte))
        if wanted is None:
            wanted = self._usual() if self.last in _SEPARATORS else b""
        return wanted[len(self.run) :] if wanted.startswith(self.run) else b""
