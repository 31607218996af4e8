"""The wire types of `/v1/embeddings`, `/v1/score` and `/v1/rerank`, as in OpenAI's, vLLM's and Jina's
APIs."""

from typing import Literal

import msgspec

from personae.api.wire.schema import Body, WeightedAdapter
from personae.engine.params import Pooling

Texts = str | list[str]


class PromptFields(Body, kw_only=True):
    """What the routes have in common. `timeout`: seconds from the request's arrival."""

    model: str | None = None
    user: str | None = None
    adapters: list[WeightedAdapter] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None


class EmbeddingRequest(PromptFields, kw_only=True):
    """`POST /v1/embeddings`. An input is text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    # Extensions: which hidden states make the vector, and whether its length is made 1.
    pooling: Pooling = "last"
    normalize: bool = True


class ScoreRequest(PromptFields, kw_only=True):
    """`POST /v1/score`: one text against many, or as many pairs as there are texts."""

    text_1: Texts
    text_2: Texts
    # What makes a text relevant to another, in a sentence.
    instruction: str | None = None


class RerankRequest(PromptFields, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True
    instruction: str | None = None


class PromptUsage(msgspec.Struct):
    """Tokens of a request that has no text as its answer."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """One input's vector: numbers, or their bytes (float32, little-endian) in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(msgspec.Struct):
    """The answer of `POST /v1/embeddings`."""

    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: Literal["list"] = "list"


class Score(msgspec.Struct):
    """How relevant the second text of a pair is to the first, from 0 to 1."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(msgspec.Struct):
    """The answer of `POST /v1/score`."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    object: Literal["list"] = "list"


class RankedDocument(msgspec.Struct):
    """A document as it was sent."""

    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's place: its index in the request, and how relevant it is to the query, from 0 to 1."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(msgspec.Struct):
    """The answer of `POST /v1/rerank`, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage
