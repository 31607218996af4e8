"""The engine core's process without an engine: every sequence gets a token in each step, at a fixed pace.

    python -m personae.evals.mock_core STEP_SECONDS FD

It costs next to nothing, so that the frontend can be measured (`evals/frontend_cost.py`).
"""

import os
import random
import selectors
import socket
import sys
import time

from personae.actors.client import ModelCard
from personae.actors.framing import HEADER, decoder, frame, frame_length, receive_first
from personae.actors.messages import Cancel, EngineCoreStarted, Message, Pin, Pinned, StepDone, Submit
from personae.actors.wire import Facts, Loaded, Pulse, Start, ToCore
from personae.engine.generation_config import GenerationDefaults
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import EngineCounters, SchedulerStats
from personae.engine.tokens import Tokenizer
from personae.lora.bounds import AdapterBounds
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

MAX_MODEL_LEN = 8192
PULSE_SECONDS = 0.5


class MockCore:
    """The sequences, and how many tokens each still gets."""

    def __init__(self, line: socket.socket, words: list[int]) -> None:
        self._line = line
        self._words = words
        self._left: dict[str, int] = {}
        self._new: list[str] = []
        self._random = random.Random(0)
        self._steps = self._tokens = 0

    def take(self, message: Message) -> None:
        """A message of the frontend's."""
        match message:
            case Submit(logs=logs):
                for log in logs:
                    self._left[log.id] = _budget(log)
                    self._new.append(log.id)
            case Cancel(ids=ids):
                ended = tuple(id for id in ids if self._left.pop(id, None) is not None)
                self._say(StepDone(tuple(Delta(id, finish="cancelled") for id in ended), self._stats()))
            case Pin(adapter=adapter, epoch=epoch):
                self._say(Pinned(adapter, epoch))

    def step(self) -> None:
        """A token for everyone."""
        deltas = []
        for id, left in self._left.items():
            token = self._random.choice(self._words)
            deltas.append(Delta(id, (token,), finish="length" if left == 1 else None))
        self._left = {id: left - 1 for id, left in self._left.items() if left > 1}
        self._steps += 1
        self._tokens += len(deltas)
        admitted, self._new = tuple(self._new), []
        if deltas:
            self._say(StepDone(tuple(deltas), self._stats(), admitted))

    def pulse(self) -> None:
        """It lives."""
        self._say(Pulse(False, self._steps))

    def _stats(self) -> SchedulerStats:
        counters = EngineCounters(steps=self._steps, tokens=self._tokens)
        return SchedulerStats(running=len(self._left), counters=counters)

    def _say(self, message: Message) -> None:
        self._line.sendall(frame(message))


def _budget(log: SequenceLog) -> int:
    return max(log.budget(MAX_MODEL_LEN), 1)


def plain_words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are whole words."""
    texts = ((id, tokenizer.token_text(id)) for id in range(tokenizer.vocab_size))
    return [id for id, text in texts if text.strip().isalpha() and text.isascii()]


def main() -> None:
    """Be the engine core."""
    seconds, line = float(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    start: Start = receive_first(line, Start)
    tokenizer = Tokenizer.load(start.options.model)
    name, *_ = start.options.base_names("mock")
    models = {name: ModelCard(name, None, 0)}
    bounds = AdapterBounds(LoraShapes(1, sites({"q": (8, 8)})), 16, 65504.0)
    facts = Facts(models, MAX_MODEL_LEN, tokenizer.vocab_size, GenerationDefaults(), 1, bounds)
    line.sendall(frame(Loaded(facts)) + frame(EngineCoreStarted(start.epoch, SchedulerStats())))
    core = MockCore(line, plain_words(tokenizer))
    decode = decoder(ToCore).decode
    waiting = selectors.DefaultSelector()
    waiting.register(line, selectors.EVENT_READ)
    data = bytearray()
    due = pulse = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= pulse:
            core.pulse()
            pulse = now + PULSE_SECONDS
        if now >= due:
            core.step()
            due = max(due + seconds, now)
        if waiting.select(max(due - time.monotonic(), 0)):
            received = line.recv(2**18)
            if not received:
                os._exit(0)
            data += received
            while len(data) >= HEADER and len(data) >= (end := HEADER + frame_length(data, 0)):
                core.take(decode(bytes(data[HEADER:end])))
                del data[:end]


if __name__ == "__main__":
    main()
