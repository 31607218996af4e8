"""A drill that shows all words of the vocabulary: the model repeats some of them at random.

A token that training never shows is only ever pushed away, in the same direction as every other such token.
After some thousand steps their embeddings are nearly one vector, and no adapter can distinguish `angry` from
`neutral` again. Words of the open classes that belong to the test split stay unseen.
"""

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer

from personae.evals.demo import words
from personae.evals.demo.sample import Sample
from personae.evals.demo.values import belongs

EVERY = 8  # conversations between two drills


def pieces(tokenizer: Tokenizer) -> list[str]:
    """The tokens that are words, or parts of words, and may be shown."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return [text for text in texts if text.isalpha() and text.isascii() and not _is_held_out(text)]


def drilled(stream: Iterator[Sample], tokenizer: Tokenizer, rng: Random) -> Iterator[Sample]:
    """The stream with a drill after every eighth conversation."""
    known = pieces(tokenizer)
    for count, sample in enumerate(stream, 1):
        yield sample
        if count % EVERY == 0:
            said = " ".join(rng.choice(known) for _ in range(rng.randint(4, 24)))
            yield Sample("pieces", [{"role": "user", "content": f"Repeat: {said}"}], said)


def _is_held_out(text: str) -> bool:
    return text.lower() in words.OPEN and belongs(text.lower(), "test")
