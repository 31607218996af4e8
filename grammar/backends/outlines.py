"""Choices and regular expressions by outlines-core (https://github.com/dottxt-ai/outlines-core): finite
automata over tokens, built in advance.

By itself it tries every token in every state, and takes the leftmost alternative as the only one: of `a|ab`
it never writes `ab`. So here it gets only the tokens that the automaton over bytes can read, and an
expression that matches only at the end of the text.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain

from llguidance import regex_to_lark
from outlines_core import Index
from outlines_core import Vocabulary as Tokens

from personae.errors import GrammarError
from personae.grammar.backends.deterministic import places, unanchored
from personae.grammar.budget.automaton import AutomatonGrammar
from personae.grammar.schema.document import PARAMS
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

_PLACES = 1024  # bytes of a choice's texts, places of an expression
_LOOKED_AT = 2**14  # tokens that begin as an answer may continue: a millisecond or two
_TRIED = 2**16  # states times tokens that are tried in each: up to 6 ms
_STOP = 256

OverBytes = Mapping[int, Mapping[int, int]]
"""An automaton's next state, by state and byte, or `_STOP`."""

_BYTES = Tokens(_STOP, {bytes((byte,)): [byte] for byte in range(256)})


class OutlinesBackend:
    """Compiles specs for one vocabulary. `compile` is thread-safe, and mostly runs without the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: defaultdict[bytes, list[int]] = defaultdict(list)
        for token, text in enumerate(vocabulary.tokens):
            if text:
                self._ids[text].append(token)
        self._beginning: defaultdict[bytes, list[bytes]] = defaultdict(list)  # texts by their first two bytes
        for text in self._ids:
            self._beginning[text[:2]].append(text)
        self._longest = {two: max(map(len, texts)) for two, texts in self._beginning.items()}

    def compile(self, spec: GrammarSpec) -> AutomatonGrammar:
        """Compile a choice or a regular expression.

        Raises GrammarError unless its automaton is known to be small and to mean the same in other backends.
        """
        pattern = _pattern_of(spec)
        if pattern is None:
            raise _refusal(spec)
        stop = self._vocabulary.stop_ids[0]
        try:
            over_bytes = Index(pattern, _BYTES).get_transitions()
            if spec.kind == "choice":
                texts = {part for choice in json.loads(spec.source) for part in self._parts(choice.encode())}
            else:
                texts = self._alike(over_bytes)
            if len(texts) * len(over_bytes) > _TRIED:
                raise _refusal(spec)
            index = Index(pattern, Tokens(stop, {text: self._ids[text] for text in texts}))
        except ValueError:  # too many tokens, or too few to write it, or it matches no text
            raise _refusal(spec) from None
        transitions = index.get_transitions()
        for following in transitions.values():
            following.pop(stop, None)
        return AutomatonGrammar(
            transitions, index.get_initial_state(), index.get_final_states(), self._vocabulary
        )

    def _parts(self, text: bytes) -> Iterator[bytes]:
        """The tokens' texts of which `text` may consist."""
        for at in range(len(text)):
            for end in range(at + 1, min(at + self._longest.get(text[at : at + 2], 1), len(text)) + 1):
                if text[at:end] in self._ids:
                    yield text[at:end]

    def _alike(self, over_bytes: OverBytes) -> set[bytes]:
        """The tokens' texts that may appear in an answer, and some others: their first two bytes may follow
        one another, and all their bytes appear in answers. Raises ValueError if there are too many."""
        beginning = [self._beginning.get(two, ()) for two in _beginnings(over_bytes)]
        if sum(map(len, beginning)) > _LOOKED_AT:
            raise ValueError("too many tokens may stand in an answer")
        alphabet = bytes({byte for following in over_bytes.values() for byte in following if byte != _STOP})
        return {text for text in chain.from_iterable(beginning) if not text.translate(None, alphabet)}


def _pattern_of(spec: GrammarSpec) -> str | None:
    """A pattern for the whole answer, in Rust's syntax. None if it is not known to be a small automaton.

    If nothing but the end of the text may follow, no alternative is preferred to another.
    """
    if spec.kind == "choice":
        choices = json.loads(spec.source)
        if sum(len(choice.encode()) for choice in choices) > _PLACES:
            return None
        return rf"(?:{'|'.join(map(re.escape, choices))})\z"
    if spec.kind != "regex":
        return None
    pattern = unanchored(spec.source)
    size = places(pattern)
    if size is None or size > _PLACES:
        return None
    return rf"(?:{regex_to_lark(pattern, use_ascii='d')})\z"


def _beginnings(over_bytes: OverBytes) -> set[bytes]:
    """The bytes, and the pairs of bytes, that may follow one another in an answer."""
    into: defaultdict[int, set[int]] = defaultdict(set)
    for following in over_bytes.values():
        for byte, state in following.items():
            if byte != _STOP:
                into[state].add(byte)
    joints = {
        (frozenset(before), frozenset(over_bytes.get(state, ())) - {_STOP}) for state, before in into.items()
    }
    pairs = {bytes((one, other)) for before, after in joints for one in before for other in after}
    return pairs | {bytes((byte,)) for before in into.values() for byte in before}


def _refusal(spec: GrammarSpec) -> GrammarError:
    return GrammarError(
        f"The backend outlines does not support this {spec.kind}: it supports choices and regular "
        "expressions whose automata are known to be small.",
        param=PARAMS.get(spec.kind),
    )
