"""An engine without a model: it answers by script, byte by byte, and records its calls."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from personae.actors.client import EngineStats, ModelCard
from personae.engine.sequence import Delta, SequenceLog, TokenLogprobs
from personae.engine.tokens import Tokenizer

BOS, START, END = "<s>", "<|im_start|>", "<|im_end|>"
BOS_ID, START_ID, END_ID = 256, 257, 258
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHATML, special: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, three special tokens, then those in `special`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, START, END, *special])
    return Tokenizer(
        backend,
        bos_id=BOS_ID,
        eos_ids=(END_ID,),
        chat_templates={} if chat_template is None else {"default": chat_template},
        special_tokens={"bos_token": BOS, "eos_token": END},
    )


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """Made-up log-probabilities, always the same: the lower the id's last digit, the likelier the token."""
    logprob = -0.1 - token % 10
    others = [((token + step) % 256, logprob - step) for step in range(1, top)]
    return TokenLogprobs(token, logprob, 1, tuple([(token, logprob), *others][:top]))


def vector_of(log: SequenceLog) -> bytes:
    """A made-up vector, always the same for one prompt and adapter."""
    start = sum(log.tokens[: log.prompt_length]) + (log.adapter is not None)
    return np.sin(np.arange(start, start + 8, dtype=np.float32)).tobytes()


@dataclass
class FakeEngine:
    """Implements EngineClient. `answer` is every request's answer, or a function of its log.

    With `hold_prompt` nothing happens at all; with `hold_begun` a sequence begins to run, and has no tokens;
    after `hold_after` tokens of a sequence nothing more happens; after `fail_after` it fails. `refuse` is
    raised on entering a stream, `refuse_late` from its iteration. One delta has `burst` tokens.
    """

    answer: str | Callable[[SequenceLog], str] = "Hello, world!"
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    max_model_len: int = 512
    vocab_size: int = 300
    base_names: tuple[str, ...] = ("base",)
    burst: int = 1
    hold_after: int | None = None
    hold_prompt: bool = False
    hold_begun: bool = False
    fail_after: int | None = None
    refuse: Exception | None = None
    refuse_late: Exception | None = None
    figures: EngineStats = field(default_factory=EngineStats)
    submitted: list[SequenceLog] = field(default_factory=list)
    kept_sessions: list[tuple[str, str, float]] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    stopped: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def models(self, tenant: str) -> dict[str, ModelCard]:
        """The base, by all of its names, and one adapter."""
        return {
            **{name: ModelCard(name, None, 1_700_000_000, quantization="int8") for name in self.base_names},
            "team/pirate": ModelCard("team/pirate", "d" * 64, 1_700_000_001, "base", 8),
        }

    def salt(self, tenant: str) -> bytes:
        """The tenant's salt."""
        return tenant.encode()

    def keep_loaded(self, adapters: Sequence[str]) -> None:
        """Keep nothing."""

    def keep_session(self, tenant: str, session: str, seconds: float) -> None:
        """Note it."""
        self.kept_sessions.append((tenant, session, seconds))

    def forget_session(self, tenant: str, session: str) -> None:
        """Note it."""
        self.kept_sessions.append((tenant, session, -1))

    def stats(self) -> EngineStats:
        """The figures that the test set."""
        return self.figures

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator["FakeStream"]:
        """Run in the caller's task: nothing happens between two deltas unless the caller waits for the
        next."""
        await anyio.lowlevel.checkpoint()
        if self.refuse is not None:
            raise self.refuse
        self.submitted += logs
        stream = FakeStream(self, logs)
        self.live |= stream.states.keys()
        try:
            yield stream
        finally:
            for id in stream.states:
                self.cancelled.append(id)
                self.live.discard(id)
            self.left.set()


class FakeStream:
    """The sequences of one submission that still run."""

    def __init__(self, engine: FakeEngine, logs: Sequence[SequenceLog]) -> None:
        self._engine = engine
        self._turn = -1
        self.states = {log.id: _ScriptedRequest(engine, log) for log in logs}

    def take_at_once(self, take: Callable[[Delta], bool]) -> None:
        """The iteration brings every delta."""

    def stop(self, id: str) -> None:
        """End one sequence now."""
        self._engine.stopped.append(id)
        self._end(id)

    def _end(self, id: str) -> None:
        self.states.pop(id, None)
        self._engine.live.discard(id)

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> Delta:
        await anyio.lowlevel.checkpoint()
        if self._engine.refuse_late is not None:
            raise self._engine.refuse_late
        if not self.states:
            raise StopAsyncIteration
        self._turn += 1
        id = list(self.states)[self._turn % len(self.states)]
        delta = self.states[id].step()
        if delta is None:
            await anyio.sleep_forever()
            raise AssertionError("unreachable")
        if delta.finish is not None:
            self._end(id)
        return delta


class _ScriptedRequest:
    """One sequence: its answer, and how far it is."""

    def __init__(self, engine: FakeEngine, log: SequenceLog) -> None:
        self._engine = engine
        self._log = log
        text = engine.answer(log) if callable(engine.answer) else engine.answer
        self._planned = [*engine.tokenizer.encode(text, False), *log.eos]
        self._emitted = 0
        self._prompt_done = False

    def step(self) -> Delta | None:
        """The next delta; None to hang."""
        engine, log, params = self._engine, self._log, self._log.params
        if engine.hold_prompt:
            return None
        if engine.hold_begun:
            bound = log.grammar is not None or log.adapter is not None
            told, self._prompt_done = self._prompt_done, True
            return Delta(log.id) if bound and not told else None
        if not self._prompt_done:
            self._prompt_done = True
            if params.prompt_logprobs is not None:
                return Delta(log.id, prompt_logprobs=self._prompt_logprobs(params.prompt_logprobs), cached=0)
            return Delta(log.id, cached=log.prompt_length // 2)
        tokens: list[int] = []
        finish: str | None = None
        stop_token: int | None = None
        while finish is None and len(tokens) < engine.burst:
            if self._emitted == engine.fail_after:
                return Delta(log.id, tuple(tokens), finish="error", error="planted")
            if self._emitted == engine.hold_after:
                return Delta(log.id, tuple(tokens)) if tokens else None
            token = self._planned[self._emitted % len(self._planned)]
            self._emitted += 1
            tokens.append(token)
            ends = (token in log.eos and not params.ignore_eos) or token in params.stop_token_ids
            if ends and self._emitted > params.min_tokens:
                finish, stop_token = "stop", token
            elif self._emitted == params.max_tokens:
                finish = "length"
        logprobs = ()
        if params.logprobs is not None:
            logprobs = tuple(logprobs_of(token, params.logprobs) for token in tokens)
            if named := params.logprob_tokens:
                top = tuple((token, -1.0 - token) for token in named)
                logprobs = tuple(msgspec.structs.replace(entry, top=top) for entry in logprobs)
        vector = None if params.pooling is None else vector_of(log)
        return Delta(log.id, tuple(tokens), logprobs, finish=finish, stop_token=stop_token, embedding=vector)

    def _prompt_logprobs(self, top: int) -> tuple[TokenLogprobs | None, ...]:
        prompt = self._log.tokens[: self._log.prompt_length]
        return (None, *(logprobs_of(token, top) for token in prompt[1:]))
