"""Excludes tokens from a sequence: those outside `allowed_tokens`, and those that would complete a bad word.

A bad word is a sequence of token ids. Its last id is excluded whenever the ids before it have just been
emitted. The prompt does not count, as in vLLM. All words that have begun are tracked, even one inside
another.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from personae.engine.sequence import SequenceLog
from personae.grammar.bitmask import Bitmask, leave_out, words_of
from personae.grammar.matcher import Binding


@dataclass(slots=True)
class _Node:
    """A node of the trie of bad words, for one prefix: `last` are the ids that complete a word, `longer` the
    next nodes."""

    last: list[int] = field(default_factory=list)
    longer: dict[int, "_Node"] = field(default_factory=dict)


@lru_cache(64)
def _trie_of(words: tuple[tuple[int, ...], ...]) -> _Node:
    """The root of the trie. Sequences with the same bad words share it."""
    root = _Node()
    for *first, last in words:
        node = root
        for token in first:
            node = node.longer.setdefault(token, _Node())
        node.last.append(last)
    return root


class Exclusion(Binding):
    """The binding of one sequence with exclusions. Its state depends on the log
    alone."""

    def __init__(self, log: SequenceLog, vocab_size: int) -> None:
        """Begins after the log's tokens. All ids are in the vocabulary, and no bad word is empty."""
        params = log.params
        self._mask = np.full(words_of(vocab_size), -1, np.int32)
        if params.allowed_tokens:
            self._mask[:] = np.frombuffer(params.allowed_tokens, np.int32)
        self._root = _trie_of(params.bad_words_token_ids)
        leave_out(self._mask, self._root.last)
        self._nodes: list[_Node] = []
        for token in log.tokens[log.prompt_length :]:
            self.accept(token)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Writes the tokens that may come next to `bitmask[row]`."""
        bitmask[row] = self._mask
        for node in self._nodes:
            leave_out(bitmask[row], node.last)

    def accept(self, token: int) -> bool:
        """Advances by one token."""
        nodes = (self._root, *self._nodes)
        self._nodes = [node.longer[token] for node in nodes if token in node.longer]
        return True
