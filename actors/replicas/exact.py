"""Which blocks of prompts are in a replica's prefix cache, according to its own events (`--kv-events`)."""

from collections.abc import Iterable, Sequence

from personae.engine.scheduling.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class ExactPrefixes:
    """The names of the blocks that are in a replica's prefix cache."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.block_size = 0  # 0 until the first block is stored

    def hear(self, events: Iterable[KVEvent]) -> None:
        """Apply events of the replica's prefix cache."""
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
        """Return how many tokens of a prompt with these blocks are cached here."""
        count = 0
        for name in names:
            if name not in self.names:
                break
            count += 1
        return count * self.block_size
