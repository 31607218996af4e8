"""Which tokens the pages of a KV cache hold, written down where it outlives the engine.

An entry says: this page follows the page, or the root, of that name, and holds these tokens. It grows as the
page fills. The scheduler writes it when a step is committed, so all that an entry says is computed. An entry
is cleared before its page is given to anything else. Its count of tokens is written last and cleared first.
So a process that is killed at any point leaves only true entries behind.

The next engine with the same memory puts what it finds into its prefix cache. A page that is not full is
found there, too: it is copied like any page of which a part agrees. All tokens are compared, as ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np

from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.page_names import NAME_BYTES, RootKey, Token, root_key, root_name
from personae.engine.scheduling.prefix import TrieNode, TrieRoot, name_of

SETTLED_STEPS = 16  # after which an engine is taken to live with the pages that it found
ROOT_BYTES = 512  # for a root's key and its tenant's name; pages of longer ones are not written down
_STATUS = 4096  # bytes before the entries


class LedgerPage(NamedTuple):
    """A page, and the tokens that it holds."""

    page: int
    chunk: tuple[int, ...]


class LedgerRoot(NamedTuple):
    """The root of a tree of pages, and the name of its tenant."""

    key: RootKey
    tenant: str


class LedgerFinding(NamedTuple):
    """What a ledger says: the roots, and the pages by the name of the page or root that they follow."""

    roots: list[LedgerRoot]
    pages: dict[bytes, list[LedgerPage]]


class _RootEntry(msgspec.Struct, frozen=True, array_like=True):
    """A key as `root_key` makes it of salt and adapter, and the tenant's name."""

    salt: bytes
    adapter: str | None
    tenant: str


class PageLedger:
    """The entries of `pages` pages of `page_size` tokens, in `memory` of `ledger_bytes`. `partial`: pages
    that are not full may be used."""

    def __init__(self, memory: memoryview, pages: int, page_size: int, *, partial: bool = True) -> None:
        self._partial = partial
        self._pages, self._size = pages, page_size
        ends = np.cumsum([_STATUS, *_areas(pages, page_size)]).tolist()
        status, counts, tokens, parents, roots = (
            memory[begin:end] for begin, end in zip([0, *ends], ends, strict=False)
        )
        self._trial = status[:4].cast("I")  # 1 while an engine has found pages and has not settled
        self._counts = counts[: 4 * pages].cast("I")
        self._tokens = tokens[: 8 * pages * page_size].cast("q")
        self._parents, self._roots = parents, roots
        self._steps = 0
        self._opened = False

    def follow(self, sequences: Iterable[LiveSequence]) -> None:
        """Note what those pages of these sequences hold that are not full."""
        if not self._partial:
            return
        size, counts, ids = self._size, self._counts, self._tokens
        for sequence in sequences:
            begin, end = sequence.publish_at - size, sequence.computed
            place = end - begin - 1
            if place < 0:
                continue
            page = sequence.pages[begin // size]
            if place and counts[page] == place:  # one token more, as nearly always
                ids[page * size + place] = sequence.tokens[end - 1]
                counts[page] = place + 1
            elif not sequence.log.adapter_start or sequence.log.adapter is None:
                handle = sequence.handle
                assert handle is not None
                self.note(
                    page, handle.nodes[-1] if handle.nodes else handle.root, sequence.tokens, begin, end
                )

    def note(self, page: int, parent: TrieNode, tokens: Sequence[Token], start: int, end: int) -> None:
        """The page follows `parent`, and holds `tokens[start:end]`, computed. An entry that has the first of
        these already grows."""
        held = self._counts[page]
        if not held and not self._begin(page, parent):
            return
        ids, offset = self._tokens, page * self._size - start
        for place in range(start + held, end):
            token = tokens[place]
            if token.__class__ is tuple:  # an adapter becomes active there
                self.clear(page)
                return
            ids[offset + place] = cast(int, token)
        self._counts[page] = end - start

    def _begin(self, page: int, parent: TrieNode) -> bool:
        """Write what the page follows. Returns whether there is room for it."""
        self._parents[page * NAME_BYTES : (page + 1) * NAME_BYTES] = name_of(parent)
        if isinstance(parent, TrieRoot):
            key = parent.key
            root = msgspec.msgpack.encode(
                _RootEntry(key[1], key[2] if len(key) == 3 else None, parent.tenant.name)
            )
            data = len(root).to_bytes(2, "little") + root
            if len(data) > ROOT_BYTES:
                return False
            self._roots[page * ROOT_BYTES : page * ROOT_BYTES + len(data)] = data
        return True

    def clear(self, page: int) -> None:
        """The page is about to hold something else."""
        self._counts[page] = 0

    def stepped(self) -> None:
        """A step was committed."""
        if self._steps < SETTLED_STEPS:
            self._steps += 1
            if self._steps == SETTLED_STEPS:
                self._trial[0] = 0

    def open(self) -> LedgerFinding:
        """What another engine has left; the first time only. Nothing if the engine before this one found
        pages and ended before it had settled: they may have been the reason. Call `clear` for each page that
        is not used."""
        if self._opened or self._trial[0]:
            for page in self.held():
                self.clear(page)
        self._opened = True
        found = LedgerFinding([], {})
        known: set[bytes] = set()
        for page in self.held():
            parent = bytes(self._parents[page * NAME_BYTES : (page + 1) * NAME_BYTES])
            root = None if parent in known else self._root(page)
            if root is not None and root_name(root.key) == parent:  # else it is of an earlier entry
                known.add(parent)
                found.roots.append(root)
            found.pages.setdefault(parent, []).append(LedgerPage(page, self.chunk(page)))
        self._trial[0] = bool(found.pages)
        return found

    def _root(self, page: int) -> LedgerRoot | None:
        """What is written as the root of a page, if that is readable."""
        data = self._roots[page * ROOT_BYTES : (page + 1) * ROOT_BYTES]
        size = int.from_bytes(data[:2], "little")
        if not size:
            return None
        try:
            entry = msgspec.msgpack.decode(data[2 : 2 + size], type=_RootEntry)
        except msgspec.DecodeError:
            return None
        return LedgerRoot(root_key(entry.salt, entry.adapter), entry.tenant)

    def held(self) -> list[int]:
        """The pages that have an entry."""
        found: list[int] = np.flatnonzero(np.frombuffer(self._counts, np.uint32)).tolist()
        return found

    def chunk(self, page: int) -> tuple[int, ...]:
        """The tokens of a page, as its entry says."""
        begin = page * self._size
        return tuple(self._tokens[begin : begin + min(self._counts[page], self._size)])


def ledger_bytes(pages: int, page_size: int) -> int:
    """The memory of a ledger. What belongs to pages that were never used is never written."""
    return _STATUS + sum(_areas(pages, page_size))


def _areas(pages: int, page_size: int) -> Iterator[int]:
    """The bytes of counts, tokens, parents and roots."""
    for each in (4, 8 * page_size, NAME_BYTES, ROOT_BYTES):
        yield -(-pages * each // 8) * 8
