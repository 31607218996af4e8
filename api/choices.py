"""One choice of an answer, as it grows: turns the engine's deltas into text, logprobs and a reason to end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.output_parser import OutputParser, PlainOutputParser, ShapedOutputParser, TextStyle
from personae.api.output_pieces import OutputPieces, Span, TokenEntry
from personae.api.wire.answers import Extension, Validation
from personae.engine.sequence import Delta, TokenLogprobs
from personae.engine.tokens import Detokenizer, Tokenizer
from personae.grammar.structure.answer import AnswerShape


class Part(msgspec.Struct):
    """What a choice gained. Parts of one choice can be added. `finish` is None until its last part.

    `tokens` are the emitted ids, including the stopping one; `reasoned` counts those of the reasoning.
    `stop_reason` is the stop string or stop token id that ended the choice, None for EOS. `entries` has one
    entry per token if logprobs were requested, with an echoed prompt's tokens before the others. `validation`
    comes with the last part, if anything was checked. `moved`: as in `Delta`.
    """

    index: int
    words: OutputPieces = msgspec.field(default_factory=OutputPieces)
    tokens: list[int] = []
    entries: list[TokenEntry] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    reasoned: int = 0
    queued: float | None = None
    moved: int = 0
    validation: Validation | None = None

    @property
    def only_text(self) -> str:
        """Its text, if the part is only text for the reader and the tokens of it; else empty."""
        pieces = self.words.pieces
        if self.finish is None and len(pieces) == 1 and isinstance(only := pieces[0], Span):
            return "" if only.reasoning else only.text
        return ""

    @property
    def extension(self) -> Extension | UnsetType:
        """The fields at the end of a choice that OpenAI does not have."""
        return UNSET if self.validation is None else Extension(self.validation)

    def add(self, later: "Part") -> None:
        """Add what came after this part."""
        self.words.add(later.words)
        self.tokens += later.tokens
        self.entries += later.entries
        self.prompt_logprobs += later.prompt_logprobs
        self.finish = later.finish
        self.stop_reason = later.stop_reason
        self.cached += later.cached
        self.reasoned += later.reasoned
        self.moved += later.moved
        self.queued = later.queued if self.queued is None else self.queued
        self.validation = later.validation


class OutputCheck(Protocol):
    """Validates a finished answer."""

    def take(self, words: OutputPieces) -> None:
        """What the answer gained."""

    async def outcome(self) -> Validation | None:
        """The result. None if there was nothing to validate."""


class Choice:
    """Follows one sequence. `opening` is text that comes before the answer (an echo); with
    `opening_reasons` it is reasoning.

    `prompt` is what the answer continues; with `echoed` its tokens have entries too. Without `answers` (an
    echo with `max_tokens` 0), the one token that the engine had to make is dropped. With a `shape`, the
    answer is divided into its parts; `special` maps the names of special tokens to ids. `check` sees the
    whole text.
    """

    __slots__ = (
        "_answers",
        "_check",
        "_eos",
        "_include_stop",
        "_opening",
        "_opening_reasons",
        "_parser",
        "_pending",
        "_places",
        "_plain",
        "_prompt",
        "_prompt_seen",
        "ended",
        "index",
        "may_stop",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        style: TextStyle,
        *,
        prompt: Sequence[int],
        opening: str = "",
        opening_reasons: bool = False,
        echoed: bool = False,
        offsets: bool = False,
        answers: bool = True,
        shape: AnswerShape | None = None,
        special: Mapping[str, int] | None = None,
        check: OutputCheck | None = None,
    ) -> None:
        self.index = index
        self.ended = False
        self.may_stop = bool(style.stop)  # a stop string may end it before the engine does
        self._opening = opening
        self._opening_reasons = opening_reasons
        self._prompt = prompt if echoed else ()
        self._prompt_seen = 0
        self._pending: list[TokenEntry] = []  # of tokens that may yet turn out not to be text
        self._answers = answers
        self._check = check if answers else None
        self._include_stop = style.include_stop
        self._eos = tokenizer.eos_ids
        self._parser: OutputParser
        self._plain: PlainOutputParser | None = None  # if tokens need not be taken one by one
        if shape is None:
            self._parser = plain = PlainOutputParser(tokenizer, style, prompt)
            if answers and not (style.stop or echoed):
                self._plain = plain
        else:
            self._parser = ShapedOutputParser(tokenizer, style, prompt, shape, special or {})
        self._places = None
        if offsets:
            self._places = _Places(
                Detokenizer(
                    tokenizer,
                    skip_special_tokens=style.skip_special_tokens,
                    after=() if echoed else prompt,
                )
            )

    def take(self, delta: Delta) -> Part:
        """What `delta` adds. The last part sets `ended`; a stop string may cause that early."""
        if self._plain is not None and delta.finish is None and not delta.logprobs:
            part = self._part(delta, self._plain.push_all(delta.tokens), [*delta.tokens])
        else:
            part = self._part(delta, OutputPieces(), [])
            self._take_each(delta, part)
        if self._check is not None:
            self._check.take(part.words)
        if self._opening:
            opened = OutputPieces()
            opened.say(self._opening, reasoning=self._opening_reasons)
            opened.add(part.words)
            self._opening = ""
            part.words = opened
        return part

    async def judge(self, last: Part) -> None:
        """Check the whole answer, if it has to be checked. `last` is its last part."""
        if self._check is not None:
            last.validation = await self._check.outcome()

    def _part(self, delta: Delta, words: OutputPieces, tokens: list[int]) -> Part:
        return Part(
            self.index,
            words,
            tokens,
            prompt_logprobs=[*delta.prompt_logprobs],
            cached=delta.cached or 0,
            queued=delta.queued,
            moved=delta.moved,
        )

    def _take_each(self, delta: Delta, part: Part) -> None:
        for logprobs in delta.prompt_logprobs if self._prompt else ():
            token = self._prompt[self._prompt_seen]
            self._prompt_seen += 1
            part.entries.append(TokenEntry(token, logprobs, self._place(token)))
        if self._answers:
            self._take_tokens(delta, part)
        if delta.finish is not None and not self.ended:
            self.ended = True
            self._add_words(self._parser.finish(), part)
            part.stop_reason = self._parser.stopped
            if part.stop_reason is not None:
                part.finish = "stop"
            elif self._answers:
                called = delta.finish == "stop" and self._parser.called
                part.finish = "tool_calls" if called else delta.finish
                part.stop_reason = None if delta.stop_token in self._eos else delta.stop_token
            else:
                part.finish = "length"

    def _take_tokens(self, delta: Delta, part: Part) -> None:
        for index, token in enumerate(delta.tokens):
            part.tokens.append(token)
            if delta.logprobs:
                part.entries.append(TokenEntry(token, delta.logprobs[index], self._place(token)))
            ends = delta.stop_token is not None and index == len(delta.tokens) - 1
            if ends and not self._include_stop:
                return
            thinking = self._parser.thinking
            words = self._parser.push(token)
            thinking = thinking or self._parser.thinking
            part.reasoned += thinking
            if thinking:
                self._pending.clear()
            elif delta.logprobs:
                self._pending.append(part.entries[-1])
            self._add_words(words, part)
            if self._parser.stopped is not None:
                self.ended = True
                part.finish, part.stop_reason = "stop", self._parser.stopped
                return

    def _add_words(self, words: OutputPieces, part: Part) -> None:
        if self._pending and (words.credit(self._pending) or words.calls):
            self._pending.clear()
        if part.words.pieces:
            part.words.add(words)
        else:  # nobody else has them
            part.words = words

    def _place(self, token: int) -> int:
        return 0 if self._places is None else self._places.next(token)


class _Places:
    """Finds the character of the text at which each token begins, without counting held-back characters."""

    def __init__(self, text: Detokenizer) -> None:
        self._text = text
        self._at = 0

    def next(self, token: int) -> int:
        at = self._at
        self._at += len(self._text.push((token,)))
        return at
