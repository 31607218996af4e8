"""What a load consists of: the lengths of prompts and answers, the models, and the schemas that bind.

Everything follows from the workload and its seed, so several servers get the same requests.
"""

import random
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from personae.errors import RequestError
from personae.evals.bench.client import Request
from personae.evals.demo.words import NOUNS

Popularity = Literal["identical", "uniform", "zipf", "distinct"]
Api = Literal["chat", "completions"]
Draw = Callable[[random.Random], int]

_LENGTH = re.compile(r"(?:(constant|uniform|normal|lognormal):)?(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?")
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "status": {"enum": ["open", "paid", "sent"]},
        "lines": {
            "type": "array",
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "status", "lines"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "place_order",
        "description": "Place an order.",
        "strict": True,
        "parameters": ORDER,
    },
}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is requested. Lengths are in tokens, in the form that `length` reads. Shares are from 0 to 1.

    All requests of one of `prefixes` groups share the first `prefix` tokens. `schema` and `tools` are the
    shares of requests bound by a JSON Schema and by a required tool. `disconnect` is the share of clients
    that disconnect at a random point. With `full`, answers run to their full length (`ignore_eos`, which
    OpenAI's own servers do not know).
    """

    api: Api = "chat"
    prompt: str = "64"
    output: str = "64"
    prefix: int = 0
    prefixes: int = 1
    popularity: Popularity = "identical"
    zipf: float = 1.0
    schema: float = 0.0
    tools: float = 0.0
    disconnect: float = 0.0
    full: bool = True
    temperature: float = 0.0
    seed: int = 0


def length(text: str) -> Draw:
    """`128`, `uniform:64,256`, `normal:128,32` (mean, deviation) or `lognormal:128,0.5` (median, sigma).

    Raises RequestError for anything else. A draw is at least 1.
    """
    match = _LENGTH.fullmatch(text)
    if match is None or (match[1] in (None, "constant")) != (match[3] is None):
        raise RequestError(
            f"{text!r} is no length: write 128, uniform:64,256, normal:128,32 or lognormal:128,0.5.",
            param="length",
        )
    first, second = float(match[2]), float(match[3] or 0)
    match match[1]:
        case "uniform":
            return lambda rng: max(1, rng.randint(*sorted((round(first), round(second)))))
        case "normal":
            return lambda rng: max(1, round(rng.gauss(first, second)))
        case "lognormal":
            return lambda rng: max(1, round(first * rng.lognormvariate(0, second)))
    return lambda rng: max(1, round(first))


def chooser(
    popularity: Popularity, models: Sequence[str], zipf: float
) -> Callable[[int, random.Random], str]:
    """The model of request number i.

    identical: the first. uniform: any. zipf: the i-th with a weight of 1 / i ** `zipf`. distinct: in turn, so
    that as many different models as possible are used at the same time.
    """
    match popularity:
        case "identical":
            return lambda number, rng: models[0]
        case "uniform":
            return lambda number, rng: rng.choice(models)
        case "distinct":
            return lambda number, rng: models[number % len(models)]
    weights = list(accumulate((place + 1) ** -zipf for place in range(len(models))))
    return lambda number, rng: rng.choices(models, cum_weights=weights)[0]


def words(rng: random.Random, count: int) -> str:
    """Plain text of this many words."""
    return " ".join(rng.choices(NOUNS, k=max(count, 0)))


class Maker:
    """Makes the requests of a workload. `words_per_token` is the server's, found by `calibrate`.

    Requests of the same `occasion` (a load's name, a round) are the same. Other occasions have other prompts,
    so that no cache has them.
    """

    def __init__(
        self,
        workload: Workload,
        models: Sequence[str],
        keys: Sequence[str] = (),
        words_per_token: float = 1.0,
        occasion: str = "",
    ) -> None:
        self._workload = workload
        self._keys = keys
        self._model = chooser(workload.popularity, models, workload.zipf)
        self._prompt, self._output = length(workload.prompt), length(workload.output)
        self._scale = words_per_token
        self._drawn = f"{workload.seed} {occasion}"
        seeds = range(workload.prefixes)
        size = round(workload.prefix * words_per_token)
        self._prefixes = [words(random.Random(f"prefix {self._drawn} {seed}"), size) for seed in seeds]

    def make(self, number: int, prompt: int | None = None, output: int | None = None) -> Request:
        """Request `number`. A trace may set the lengths of its prompt and answer."""
        load = self._workload
        rng = random.Random(f"{self._drawn} {number}")
        prompt = self._prompt(rng) if prompt is None else prompt
        output = self._output(rng) if output is None else output
        text = " ".join(
            [self._prefixes[number % load.prefixes], words(rng, max(1, round(prompt * self._scale)))]
        ).strip()
        draw = rng.random()
        kind = "schema" if draw < load.schema else "tools" if draw < load.schema + load.tools else "free"
        body: dict[str, Any] = {
            "model": self._model(number, rng),
            "max_tokens": output,
            "temperature": load.temperature,
            "seed": rng.getrandbits(31),
        }
        if load.api == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if kind == "schema":
            schema = {"name": "order", "schema": ORDER, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind == "tools":
            body["tools"] = [TOOL]
            body["tool_choice"] = "required"
        elif load.full:
            body["ignore_eos"] = True
        key = self._keys[number % len(self._keys)] if self._keys else None
        leaves = rng.random() < load.disconnect
        return Request(
            "/v1/chat/completions" if load.api == "chat" else "/v1/completions",
            body,
            key,
            tenant=f"tenant {number % len(self._keys) + 1}" if self._keys else str(body["model"]),
            kind=kind,
            leave_after=rng.randint(1, max(1, output // 2)) if leaves else None,
        )
