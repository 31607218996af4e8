"""The small routes: models, health, version, metrics, tokenize, detokenize."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import personae
from personae.actors.client import ModelCard
from personae.api.answers import Model, ModelList, Text, Tokens
from personae.api.decode import read_json
from personae.api.generation import Door, door_of
from personae.api.respond import json_response
from personae.api.schema import DetokenizeRequest, TokenizeRequest
from personae.api.tenants.access import admin_only
from personae.api.tools import functions_of, shown_tools
from personae.errors import Overloaded, RequestError


def _model(card: ModelCard, door: Door) -> Model:
    return Model(
        card.name, card.created, door.client.max_model_len, card.parent, root=card.parent or card.name
    )


async def list_models(request: Request) -> Response:
    """`GET /v1/models`: the base first, then the adapters."""
    door = door_of(request)
    return json_response(ModelList([_model(card, door) for card in door.models()]))


async def get_model(request: Request) -> Response:
    """`GET /v1/models/{id}`."""
    door = door_of(request)
    return json_response(_model(door.model(request.path_params["id"]), door))


async def health(request: Request) -> Response:
    """`GET /health`: the process is alive."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """`GET /ready`: requests would be served now; 503 until then."""
    door = door_of(request)
    if not door.client.stats().ready:
        raise Overloaded("The engine is not ready.", code="not_ready")
    return JSONResponse({"status": "ready"})


async def version(request: Request) -> Response:
    """`GET /version`."""
    return JSONResponse({"version": personae.__version__})


@admin_only
async def metrics(request: Request) -> Response:
    """`GET /metrics`, in Prometheus's text format; for admins, since it names every tenant's adapters."""
    door = door_of(request)
    return Response(door.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the ids that a prompt or a conversation has; nothing is generated."""
    door = door_of(request)
    body = await read_json(request, TokenizeRequest, door.settings.max_json_depth)
    if body.model is not None:
        door.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either `prompt` or `messages`.", param="prompt")
    if body.messages is not None:
        functions_of(body.tools)
        text = door.render_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
            tools=shown_tools(body.tools),
        )
        ids = await door.encode(text, add_special_tokens=bool(body.add_special_tokens))
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise RequestError(f"`{name}` belongs to `messages`, not to `prompt`.", param=name)
        ids = await door.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tokenizer = door.client.tokenizer
    strings = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(Tokens(len(ids), door.client.max_model_len, ids, strings))


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids, special tokens included."""
    door = door_of(request)
    body = await read_json(request, DetokenizeRequest, door.settings.max_json_depth)
    if body.model is not None:
        door.model(body.model)
    for place, token in enumerate(body.tokens):
        if not 0 <= token < door.client.vocab_size:
            raise RequestError(f"`tokens[{place}]` is no token of this model.", param=f"tokens[{place}]")
    return json_response(Text(door.client.tokenizer.decode(body.tokens, skip_special_tokens=False)))
