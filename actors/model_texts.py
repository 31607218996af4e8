"""What an engine knows of its model's tokens: the tokenizer, the vocabulary of grammars, and what finds the
tokens of forced text.

No step needs any of it before the first grammar, so a start does not wait for it.
"""

from collections.abc import Sequence
from threading import Lock

from personae.engine.checkpoints.base import Checkpoint
from personae.engine.speculation.forced import Retokenizer
from personae.engine.tokens import Tokenizer
from personae.grammar.vocabulary import Vocabulary


class ModelTexts:
    """Each part is read when it is first asked for; any thread may ask. `vocab_size`: the number of logits.

    Reading raises ModelLoadError, where the frontend has not read the same files and refused them before.
    """

    def __init__(self, checkpoint: Checkpoint, vocab_size: int) -> None:
        self._checkpoint, self._vocab_size = checkpoint, vocab_size
        self._lock = Lock()  # guards the rest
        self._tokenizer: Tokenizer | None = None
        self._read: tuple[Vocabulary, Retokenizer] | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        with self._lock:
            return self._own_tokenizer()

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of grammars."""
        return self._all()[0]

    def retokenizer(self) -> Retokenizer:
        """What finds the tokens of forced text."""
        return self._all()[1]

    def spaceless(self) -> Sequence[int] | None:
        """See `Retokenizer`; None while it has not been read."""
        read = self._read
        return None if read is None else read[1].spaceless

    def _all(self) -> tuple[Vocabulary, Retokenizer]:
        with self._lock:
            if self._read is None:
                tokenizer = self._own_tokenizer()
                vocabulary = Vocabulary.from_tokenizer_json(
                    tokenizer.json(), self._vocab_size, tokenizer.eos_ids
                )
                self._read = vocabulary, Retokenizer(tokenizer, vocabulary.tokens)
            return self._read

    def _own_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.of(self._checkpoint.tokenizer_files())
        return self._tokenizer
