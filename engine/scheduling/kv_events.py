"""Prefix cache events, for routers that place requests: the same as vLLM's KV events.

A block is a full page. Its public name is made from the page's (`page_names.py`). The types encode as vLLM's
do: arrays that begin with the type's name.
"""

from collections import Counter

import msgspec

from personae.engine.scheduling.page_names import event_name
from personae.engine.scheduling.prefix import PageNode, TrieRoot, name_of

_MEDIUM = None  # vLLM's name for where a block is stored; None is the device's memory


class BlockStored(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """The cache now has these blocks. The first follows the parent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """The cache no longer has these blocks."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventRecorder:
    """Observes the prefix caches of an engine. `take` returns the events since the last call."""

    def __init__(self) -> None:
        self.names = Counter[int]()  # of all blocks, and in how many caches they are
        self._events: list[KVEvent] = []

    def stored(self, root: TrieRoot, node: PageNode) -> None:
        """A page was published."""
        name = event_name(name_of(node))
        parent = event_name(name_of(node.parent)) if isinstance(node.parent, PageNode) else None
        self.names[name] += 1
        if self.names[name] > 1:
            return
        tokens = [token if isinstance(token, int) else token[1] for token in node.chunk]
        adapter = root.key[2] if len(root.key) == 3 else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and parent is not None and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(tokens)
            return
        self._events.append(
            BlockStored([name], parent, tokens, len(tokens), medium=_MEDIUM, lora_name=adapter)
        )

    def removed(self, node: PageNode) -> None:
        """A page was removed."""
        name = event_name(name_of(node))
        self.names[name] -= 1
        if self.names[name]:
            return
        del self.names[name]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name]))

    def take(self) -> tuple[KVEvent, ...]:
        """The events since the last call."""
        events, self._events = self._events, []
        return tuple(events)
