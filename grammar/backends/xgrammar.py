"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar): a pushdown automaton with token masks.

It fills masks fastest. It silently ignores some JSON Schema keywords, so a schema comes here only after the
gate (grammar/schema/gate.py) has found that all of it is enforced.
"""

import re
from collections.abc import Sequence

import numpy as np
import xgrammar

from personae.errors import GrammarError
from personae.grammar.backend import BackendMatcher
from personae.grammar.bitmask import Bitmask, allow_only, words_of
from personae.grammar.gbnf import GbnfError, read_gbnf, write_ebnf
from personae.grammar.productive import matches_nothing
from personae.grammar.schema.document import MAX_WHITESPACE, PARAMS, SAID
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

# xgrammar puts the time and the source line before each message.
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")


class XGrammarBackend:
    """Compiles specs for one vocabulary. `compile` is thread-safe and runs without the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            # Whole words of the bitmask: ids past the tokens count as special, and are never allowed.
            vocab_size=-(-vocabulary.size // 32) * 32,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._vocabulary = vocabulary
        # Its own cache would hide memory from this server's cache. Threads of its own would outnumber the
        # cores when several compiles run at once.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> "XGrammarCompiled":
        """Compile a spec. Raises GrammarError if it is malformed."""
        try:
            if spec.kind == "ebnf":
                grammar = self._compiler.compile_grammar(_ebnf(spec.source))
            else:
                grammar = self._compiler.compile_json_schema(
                    spec.source if spec.kind == "json_schema" else '{"type":"object"}',
                    any_whitespace=not spec.compact,
                    separators=(",", ":") if spec.compact else None,
                    max_whitespace_cnt=MAX_WHITESPACE,
                    strict_mode=False,
                )
        except RuntimeError as error:
            reason = _WHERE.sub("", str(error)).strip()
            raise GrammarError(
                f"The {SAID.get(spec.kind, spec.kind)} cannot be compiled: {reason}", param=PARAMS[spec.kind]
            ) from error
        compiled = XGrammarCompiled(grammar, self._vocabulary)
        mask = np.zeros((1, words_of(self._vocabulary.size)), np.int32)
        compiled.matcher().fill(mask, 0)
        if not mask.any():
            raise GrammarError(
                f"The {SAID.get(spec.kind, spec.kind)} matches no text.", param=PARAMS[spec.kind]
            )
        return compiled


def _ebnf(source: str) -> str:
    """A grammar in GBNF, in xgrammar's dialect. Raises GrammarError."""
    try:
        rules = read_gbnf(source)
    except GbnfError as error:
        raise GrammarError(
            f"The grammar, read as GBNF, cannot be compiled: {error}", param=PARAMS["ebnf"]
        ) from error
    if matches_nothing(rules):
        raise GrammarError("The grammar, read as GBNF, matches no text.", param=PARAMS["ebnf"])
    return write_ebnf(rules)


class XGrammarCompiled:
    """A compiled grammar, shared by all answers that it binds."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary

    @property
    def nbytes(self) -> int:
        """Bytes held, as xgrammar counts them."""
        return int(self._grammar.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        """A new matcher at the grammar's start."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), self._vocabulary)


class XGrammarMatcher(BackendMatcher):
    """The state of one answer."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary, accepted: int = 0) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._accepted = accepted

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`. After the end, these are the stop tokens."""
        if self._matcher.is_terminated():
            allow_only(bitmask[row], self._vocabulary.stop_ids)
        else:
            self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""
        # xgrammar warns on stderr of special tokens
        if not self._vocabulary.tokens[token] and token not in self._vocabulary.stop_ids:
            return False
        taken = bool(self._matcher.accept_token(token))
        self._accepted += taken
        return taken

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""
        return next((n for n, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted; a stop token may be the last."""
        return self.fork().feed(tokens)

    def snapshot(self) -> int:
        """How many tokens have been accepted."""
        return self._accepted

    def restore(self, snapshot: int) -> None:
        """Undo what was accepted since."""
        self._matcher.rollback(self._accepted - snapshot)
        self._accepted = snapshot

    def forced(self) -> bytes:
        """Not supported."""
        return b""

    def fork(self) -> "XGrammarMatcher":
        """A second matcher in the same state."""
        return XGrammarMatcher(self._matcher.fork(), self._vocabulary, self._accepted)

    @property
    def failed(self) -> bool:
        """Never: everything is computed in advance."""
        return False

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return bool(self._matcher.is_terminated())
