"""From a request's texts and its conversation to token ids, and back."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from personae.api.exchange import Exchange, NotBrief
from personae.api.wire.conversation import DeveloperMessage, Message, SystemMessage, check_results
from personae.api.wire.decode import LONG
from personae.errors import RequestError, UnsupportedParameter

_BRIEF_SECONDS = 0.02
"""The time of the event loop that a template may use."""

_SHIFTED = re.compile(r"\bmessages\[(\d+)\]")


def encode_texts(
    exchange: Exchange,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    brief: bool,
    most: int | None = None,
    first: bool = False,
    limit: int | None = None,
) -> list[list[int]]:
    """The token ids of each text. If there are more than `most`, the last ones, or the `first`.

    Raises TooManyTokens for a text with far more than `limit`, and NotBrief.
    """
    if brief and sum(map(len, texts)) > LONG:
        raise NotBrief
    return exchange.client.tokenizer.encode_batch(texts, add_special_tokens, most, first, limit)


def decode_ids(
    exchange: Exchange, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool, brief: bool
) -> list[str]:
    """The text of each list of ids. Raises NotBrief."""
    if brief and sum(map(len, lists)) > LONG:
        raise NotBrief
    return exchange.client.tokenizer.decode_batch(lists, skip_special_tokens)


def check_ids(exchange: Exchange, ids: Sequence[int], name: str) -> None:
    """Raises RequestError naming the first id that is not a token of this model."""
    vocab = exchange.client.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        place = next(place for place, token in enumerate(ids) if not 0 <= token < vocab)
        field = f"{name}[{place}]"
        raise RequestError(
            f"`{field}` is no token of this model; ids are from 0 to {vocab - 1}.", param=field
        )


def render_chat(
    exchange: Exchange,
    messages: Sequence[Message],
    *,
    brief: bool,
    tools: Sequence[dict[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    **options: Any,
) -> str:
    """The prompt's text. The options are those of `Family.render`. What the template leaves out is added
    to `ignored`. Raises RequestError, and
    TemplateTooSlow or NotBrief if a template that must be `brief` is not. The request's own template
    never is. A conversation without instructions begins with the adapter's, if it has some."""
    family, system = exchange.family, exchange.defaults.get("system")
    settings = exchange.settings
    if chat_template is not None:
        if not settings.trust_request_chat_template:
            raise UnsupportedParameter(
                "`chat_template` is not served here: the server needs --trust-request-chat-template.",
                param="chat_template",
            )
        if brief:
            raise NotBrief
        family = family.with_template(chat_template)
    if not messages:
        raise RequestError("`messages` is empty.", param="messages")
    if len(messages) > settings.max_messages:
        raise RequestError(f"`messages` may have at most {settings.max_messages}.", param="messages")
    check_results(messages)
    if any(isinstance(message, SystemMessage | DeveloperMessage) for message in messages):
        system = None
    left_out: list[str] = []
    try:
        prompt = family.render(
            messages if system is None else [SystemMessage(system), *messages],
            tools=tools,
            kwargs=kwargs,
            seconds=_BRIEF_SECONDS if brief else None,
            left_out=left_out,
            **options,
        )
    except RequestError as error:
        if system is not None:
            error.message = _without_first(error.message)
            error.param = None if error.param is None else _without_first(error.param)
        raise
    if system is not None:
        left_out = [_without_first(name) for name in left_out]
    exchange.ignored.extend(name for name in left_out if name not in exchange.ignored)
    return prompt


def _without_first(text: str) -> str:
    """What is said of a conversation, for one without its first message."""
    return _SHIFTED.sub(lambda found: f"messages[{max(int(found[1]) - 1, 0)}]", text)
