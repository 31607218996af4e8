"""Prefix cache events, for routers that place requests: the same as vLLM's KV events.

A block is a full page. Its public name is a hash chain over the tenant's salt, the adapter's digest and all
tokens so far. So a router that knows these can compute where a prompt's blocks are. The salt never leaves the
server. The types encode as vLLM's do: arrays that begin with the type's name.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from personae.engine.scheduling.prefix import PageNode, RootKey, Token, TrieNode, TrieRoot, root_key
from personae.engine.sequence import SequenceLog

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
    """Observes one prefix cache. `take` returns the events since the last call."""

    def __init__(self) -> None:
        self._names: dict[TrieNode, int] = {}
        self._events: list[KVEvent] = []

    def stored(self, root: TrieRoot, node: PageNode) -> None:
        """A page was published."""
        parent = self._names.get(node.parent)
        name = self._names[node] = block_name(root_name(root.key) if parent is None else parent, node.chunk)
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
        name = self._names.pop(node)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name]))

    @property
    def names(self) -> set[int]:
        """The names of all blocks in the cache."""
        return set(self._names.values())

    def take(self) -> tuple[KVEvent, ...]:
        """The events since the last call."""
        events, self._events = self._events, []
        return tuple(events)


def root_name(key: RootKey) -> int:
    """The parent name of the first block of a (salt, adapter)."""
    parts = [part if isinstance(part, bytes) else part.encode() for part in key]
    return _named(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def block_name(parent: int, chunk: Sequence[Token]) -> int:
    """The name of the block with these tokens after `parent`."""
    words = array("q", [parent])
    try:
        words.extend(chunk)  # type: ignore[arg-type]  # nearly always only numbers
    except TypeError:
        return _named(words[:1].tobytes() + repr(tuple(chunk)).encode())
    return _named(words.tobytes())


def block_names(log: SequenceLog, page_size: int) -> Iterator[int]:
    """The names of the full blocks of a log, in order."""
    starts = log.adapter_start if log.adapter is not None else 0
    name = root_name(root_key(log.salt, None if starts else log.adapter))
    for at in range(0, len(log.tokens) - page_size + 1, page_size):
        chunk: tuple[Token, ...] = log.tokens[at : at + page_size]
        if starts and log.adapter is not None and at <= starts < at + page_size:
            inside = starts - at
            chunk = (*chunk[:inside], (log.adapter, log.tokens[starts]), *chunk[inside + 1 :])
        name = block_name(name, chunk)
        yield name


def _named(data: bytes) -> int:
    """Eight bytes of a hash as a signed 64-bit number."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)
