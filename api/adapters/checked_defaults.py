"""Checks an adapter's defaults by the smallest request that has them."""

import re

from personae.api import chat
from personae.api.adapters.defaults import RequestDefaults
from personae.api.answering import defaulting
from personae.api.exchange import Exchange
from personae.api.wire.conversation import UserMessage
from personae.api.wire.schema import ChatRequest
from personae.errors import Forbidden, RequestError

_FIRST = re.compile(r"[.\[]")


async def check_defaults(exchange: Exchange, defaults: RequestDefaults) -> None:
    """Admit a request to the base with these defaults, and compile what binds its answer.

    Raises RequestError naming the field if that is refused, and Forbidden for a chat template from someone
    who is not trusted with one.
    """
    trusted = exchange.settings.trust_request_chat_template or exchange.caller.identity.role == "admin"
    if defaults.get("chat_template") is not None and not trusted:
        raise Forbidden(
            "A chat template is a program: an admin's key may set `defaults.chat_template`, or the server "
            "needs --trust-request-chat-template.",
            param="defaults.chat_template",
        )
    body = ChatRequest(model=exchange.base, messages=[UserMessage("Hello")])
    try:
        exchange = await defaulting(exchange, defaults)
        if exchange.family.template is None:
            return  # no conversation can have them, and completions bind nothing
        job, _ = await chat.admit(exchange, body)
        if job.logs[0].grammar is not None:
            await job.probe()
    except RequestError as error:
        if error.param is not None and _FIRST.split(error.param)[0] in defaults.__struct_fields__:
            error.message = error.message.replace(f"`{error.param}", f"`defaults.{error.param}")
            error.param = f"defaults.{error.param}"
        raise
