"""Which blocks of prompts a replica has in its prefix cache, by what it says of it (`--kv-events`)."""

from collections.abc import Iterable, Sequence

from personae.engine.scheduling.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class ExactPrefixes:
    """The names of the blocks that can be found at a replica."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.block_size = 0  # 0 until a block was stored

    def hear(self, events: Iterable[KVEvent]) -> None:
        """Take note of what has happened there."""
        for event in events:
            match event:
                case BlockStored(block_hashes=names, block_size=size):
                    self.names.update(names)
                    self.block_size = size
                case BlockRemoved(block_hashes=names):
                    self.names.difference_update(names)
                case AllBlocksCleared():
                    self.names.clear()

    def match(self, names: Sequence[int]) -> int:
        """How many tokens of a prompt with these blocks are computed here."""
        count = 0
        for name in names:
            if name not in self.names:
                break
            count += 1
        return count * self.block_size
