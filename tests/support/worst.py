"""Models that prefer the worst tokens for an answer that must end."""

import random
from collections.abc import Callable, Sequence

from grammar_walks import allowed_tokens

from personae.evals.adversarial.engine import TASTES
from personae.grammar.budget.string_masks import Words
from personae.grammar.budget.table import TokenTable
from personae.grammar.matcher import UNDECIDED, Matcher
from personae.grammar.vocabulary import Vocabulary

Prefer = Callable[[bytes], float]

WORST: dict[str, Prefer] = {name: taste for name, taste in TASTES.items() if name != "chance"}


def text_vocabulary(special: Sequence[str] = ()) -> Vocabulary:
    """A token for each byte, a stop token (256), special tokens, and longer tokens as models have them."""
    longer = [
        b"".join((a, b)) for a in (b'"', b"{", b"[", b"}", b",") for b in (b'"', b"{", b"[", b"]", b"}")
    ]
    longer += [b'":', b'": "', b'":"', b'","', b'", "', b"[[[[", b'{"a":', b"  ", b"\n    ", b" " * 16]
    longer += [b"12", b"999", b"2024", b"e9", b"true", b"false", b"null", b"the", b" quick", b" brown fox"]
    longer += [b"a" * 8, b"abc", b"name", "é".encode(), "日本".encode(), b"think", b"</", b">\n", b"\xe6\x97"]
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (1 + len(special)) + longer
    names = {name: 257 + index for index, name in enumerate(special)}
    return Vocabulary(tuple(tokens), (256,), names)


def answer(matcher: Matcher, vocabulary: Vocabulary, prefer: Prefer, budget: int, seed: int) -> list[int]:
    """What a model writes that takes the worst token and stops as late as it can. Ties are broken at random.

    Asserts that some token is allowed at every step, and that every allowed token is accepted unless the
    matcher vetoes it.
    """
    rng = random.Random(seed)
    tokens: list[int] = []
    for _ in range(budget):
        allowed = allowed_tokens(matcher, vocabulary)
        assert allowed, f"nothing is allowed after {text_of(tokens, vocabulary)!r}"
        going_on = [token for token in allowed if token not in vocabulary.stop_ids]
        if not going_on:
            break
        going_on.sort(key=lambda token: (prefer(vocabulary.tokens[token]), rng.random()))
        stopping = len(going_on) < len(allowed)
        while going_on and (words := veto(matcher, going_on[-1])) is not None:
            going_on = [token for token in going_on if not TokenTable.holds(words, token)]
        assert going_on or stopping, f"nothing is left after {text_of(tokens, vocabulary)!r}"
        if not going_on:
            break
        assert matcher.accept(going_on[-1])
        tokens.append(going_on[-1])
    return tokens


def veto(matcher: Matcher, token: int) -> Words | None:
    """The matcher's veto of a token that its mask allows, if any."""
    words = matcher.veto(token) if matcher.verifies else None
    assert words is not UNDECIDED
    return words


def possible_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The tokens that the mask allows and the grammar does not veto."""
    allowed = allowed_tokens(matcher, vocabulary)
    return [token for token in allowed if veto(matcher.fork(), token) is None]


def text_of(tokens: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """The tokens' text, with special tokens by their names."""
    names = {token: name.encode() for name, token in vocabulary.special.items()}
    return b"".join(names.get(token, vocabulary.tokens[token]) for token in tokens)
