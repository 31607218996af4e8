"""`POST /v1/embeddings`: from prompts to vectors."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive

from personae.actors.client import ModelCard
from personae.api.answering import answering, chosen_model
from personae.api.completions import GivenPrompt
from personae.api.embeddings.prompts import WINDOW, Outcome, answered, as_completion, encoded
from personae.api.embeddings.wire import Embedding, EmbeddingRequest, Embeddings
from personae.api.exchange import Exchange
from personae.api.respond import encode_json
from personae.api.wire.schema import CompletionRequest
from personae.engine.params import SamplingParams
from personae.errors import AdapterOverflow, RequestError

MOST_VALUES = 2**21  # numbers of an answer: about 40 MB of JSON


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """A request that is checked and encoded."""

    exchange: Exchange
    body: EmbeddingRequest
    asked: CompletionRequest
    model: ModelCard
    prompts: Sequence[GivenPrompt]

    @property
    def sequences(self) -> int:
        """How many sequences it has in the engine at a time."""
        return min(len(self.prompts), WINDOW, self.exchange.settings.max_sequences)

    async def answer(self, receive: Receive) -> bytes:
        """Compute, and build the answer. Raises what Job.gather raises."""
        body, exchange = self.body, self.exchange

        def check(first: Outcome) -> None:
            _check(body, len(first.vector) // 4, len(self.prompts))

        params = SamplingParams(1, 0, temperature=0.0, ignore_eos=True, speculate=False, pooling=body.pooling)
        found = await answered(
            exchange,
            receive,
            self.asked,
            self.model,
            self.prompts,
            params,
            prefix="embd-",
            field="input",
            seen=check,
        )
        vectors = [outcome.vector for outcome in found.outcomes]
        if self.model.adapter is not None:  # the base's own weights are finite
            _check_overflow(vectors)
        data = await exchange.prepared(lambda brief: [_shown(i, raw, body) for i, raw in enumerate(vectors)])
        answer = Embeddings(data, self.model.name, found.usage)
        return await exchange.prepared(lambda brief: encode_json(answer))


async def admit(exchange: Exchange, body: EmbeddingRequest) -> EmbeddingJob:
    """Check everything and encode. Raises RequestError."""
    exchange = await answering(exchange, body.model)
    model = chosen_model(exchange, asked := as_completion(body, body.input))
    asked.add_special_tokens = body.add_special_tokens
    if body.dimensions is not None and body.dimensions < 1:
        raise RequestError("`dimensions` must be at least 1.", param="dimensions", code="out_of_range")
    size = exchange.settings.embedding_size
    if size is not None:
        _check(body, size, len(body.input) if isinstance(body.input, list) else 1)
    prompts = await encoded(exchange, asked, "input")
    body.input = asked.prompt = ""  # it is in the prompts, and may be long
    return EmbeddingJob(exchange, body, asked, model, prompts)


def _check(body: EmbeddingRequest, size: int, count: int) -> None:
    """Raises RequestError if more numbers are requested than a vector, or an answer, may have."""
    wanted = body.dimensions or size
    if wanted > size:
        raise RequestError(
            f"`dimensions` is {wanted}; this model's vectors have {size} numbers.",
            param="dimensions",
            code="out_of_range",
        )
    one = not isinstance(body.input, str) and bool(body.input) and isinstance(body.input[0], int)
    if wanted * (1 if one else count) > MOST_VALUES:
        raise RequestError(
            f"{count} vectors of {wanted} numbers are more than the {MOST_VALUES} numbers that an answer may "
            "have; send fewer inputs at a time, or ask for fewer `dimensions`.",
            param="input",
            code="too_many_values",
        )


def _check_overflow(vectors: Sequence[bytes]) -> None:
    """Raises AdapterOverflow for a vector that is not finite, or all zeros. The model's last norm makes zeros
    of states whose squares overflow."""
    for index, raw in enumerate(vectors):
        if not 0 < np.linalg.norm(np.frombuffer(raw, np.float32)) < np.inf:
            raise AdapterOverflow(
                f"The adapter's values overflow with `input[{index}]`, so that has no vector. Upload an "
                "adapter with smaller updates."
            )


def _shown(index: int, raw: bytes, body: EmbeddingRequest) -> Embedding:
    vector: NDArray[np.float32] = np.frombuffer(raw, np.float32)[: body.dimensions]
    if body.normalize:
        length = np.linalg.norm(vector)
        vector = vector / length if length else vector
    if body.encoding_format == "base64":
        return Embedding(index, base64.b64encode(vector.astype("<f4").tobytes()).decode())
    return Embedding(index, vector.tolist())
