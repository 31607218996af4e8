"""`POST /v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from starlette.requests import Request
from starlette.responses import Response

from personae.api.body import read_json
from personae.api.embeddings.relevance import relevance
from personae.api.embeddings.vectors import admit
from personae.api.embeddings.wire import (
    EmbeddingRequest,
    Embeddings,
    Ranked,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
)
from personae.api.exchange import exchange_of
from personae.api.http.operation import operation
from personae.api.respond import encode_json
from personae.api.targets import TIMEOUT
from personae.errors import RequestError


@operation(
    "POST",
    "/v1/embeddings",
    body=EmbeddingRequest,
    answers={200: Embeddings},
    headers=(TIMEOUT,),
    refuses=(404, 504),
)
async def create_embeddings(request: Request) -> Response:
    """Make a vector of each text, from the hidden states after the model's last layer."""
    exchange = exchange_of(request)
    body = await read_json(request, EmbeddingRequest, exchange)
    job = await admit(exchange, body)
    exchange.caller.ready()
    return Response(await job.answer(request.receive), media_type="application/json")


@operation(
    "POST", "/v1/score", body=ScoreRequest, answers={200: Scores}, headers=(TIMEOUT,), refuses=(404, 504)
)
async def score(request: Request) -> Response:
    """Say for pairs of texts how relevant the second is to the first."""
    exchange = exchange_of(request)
    body = await read_json(request, ScoreRequest, exchange)
    pairs = _pairs(body)
    model, found, scores = await relevance(exchange, request.receive, body, pairs, body.instruction, "text_2")
    data = [Score(index, value) for index, value in enumerate(scores)]
    answer = Scores(found.id, found.created, model.name, data, found.usage)
    return Response(encode_json(answer), media_type="application/json")


@operation(
    "POST", "/v1/rerank", body=RerankRequest, answers={200: Ranking}, headers=(TIMEOUT,), refuses=(404, 504)
)
async def rerank(request: Request) -> Response:
    """Order documents by how relevant they are to a query."""
    exchange = exchange_of(request)
    body = await read_json(request, RerankRequest, exchange)
    if body.top_n is not None and body.top_n < 1:
        raise RequestError("`top_n` must be at least 1.", param="top_n", code="out_of_range")
    pairs = [(body.query, document) for document in body.documents]
    model, found, scores = await relevance(
        exchange, request.receive, body, pairs, body.instruction, "documents"
    )
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    results = [
        Ranked(i, scores[i], RankedDocument(body.documents[i]) if body.return_documents else None)
        for i in order
    ]
    answer = Ranking(found.id, model.name, results, found.usage)
    return Response(encode_json(answer), media_type="application/json")


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """The pairs to score. Raises RequestError."""
    ones, others = (text if isinstance(text, list) else [text] for text in (body.text_1, body.text_2))
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise RequestError(
            f"`text_1` has {len(ones)} texts and `text_2` {len(others)}; send one and many, or as many of "
            "each.",
            param="text_1",
        )
    return list(zip(ones, others, strict=True))
