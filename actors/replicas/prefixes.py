"""Which beginnings of prompts a replica has probably computed, from what was sent there.

It is an approximation: the engine's own cache forgets by its own rules. A wrong guess costs time, never
tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator

from personae.engine.sequence import SequenceLog

BLOCK = 64  # tokens that are told apart together
BLOCKS = 16_384  # that are remembered of a replica, the latest


class PrefixIndex:
    """The blocks that a replica was sent. Keyed as the prefix cache is: by salt, adapter and all tokens so
    far."""

    def __init__(self, most: int = BLOCKS) -> None:
        self._most = most
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, blocks: tuple[int, ...]) -> int:
        """How many tokens of a prompt with these blocks are probably computed here."""
        count = 0
        for block in blocks:
            if block not in self._seen:
                break
            count += 1
        return BLOCK * count

    def note(self, blocks: tuple[int, ...]) -> None:
        """A prompt with these blocks is computed here."""
        seen = self._seen
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def clear(self) -> None:
        """The engine's cache is empty."""
        self._seen.clear()


def blocks_of(log: SequenceLog) -> tuple[int, ...]:
    """The names of a prompt's whole blocks."""
    return tuple(_blocks_of(log))


def _blocks_of(log: SequenceLog) -> Iterator[int]:
    name = hash((log.salt, log.adapter))
    for at in range(0, len(log.tokens) - BLOCK + 1, BLOCK):
        name = hash((name, log.tokens[at : at + BLOCK]))
        yield name
