"""Estimates which prefixes of prompts a replica has in its cache, from the prompts that were sent there.

It is an approximation: the engine's own cache evicts by its own rules. A wrong guess costs time, never
tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator

from personae.engine.sequence import SequenceLog

BLOCK = 64  # tokens per block
BLOCKS = 16_384  # remembered per replica, the latest ones


class PrefixIndex:
    """The blocks that a replica was sent. Like in the prefix cache, the key of a block is the salt, the
    adapter and all tokens up to its end."""

    def __init__(self, most: int = BLOCKS) -> None:
        self._most = most
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, blocks: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt with these blocks are probably cached here."""
        count = 0
        for block in blocks:
            if block not in self._seen:
                break
            count += 1
        return BLOCK * count

    def note(self, blocks: tuple[int, ...]) -> None:
        """Note that this replica computes a prompt with these blocks."""
        seen = self._seen
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the engine's cache is empty."""
        self._seen.clear()


def blocks_of(log: SequenceLog) -> tuple[int, ...]:
    """Return the names of a prompt's full blocks."""
    return tuple(_blocks_of(log))


def _blocks_of(log: SequenceLog) -> Iterator[int]:
    name = hash((log.salt, log.adapter))
    for at in range(0, len(log.tokens) - BLOCK + 1, BLOCK):
        name = hash((name, log.tokens[at : at + BLOCK]))
        yield name
