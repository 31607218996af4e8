"""One request and its answer: who asks, what its headers say, and the services that answer it."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import anyio
from starlette.requests import Request

from personae.actors.client import EngineClient
from personae.api.adapters.defaults import NO_DEFAULTS, RequestDefaults
from personae.api.family import Family
from personae.api.services import Services
from personae.api.settings import ApiSettings
from personae.api.targets import NO_OPTIONS, REFUSE, HeaderOptions, header_options, seconds
from personae.api.tenants.access import LOCAL_ADMIN, Caller, caller_of
from personae.api.wire.decode import LONG
from personae.errors import TemplateTooSlow

T = TypeVar("T")

CLAMPED = "x-personae-max-tokens"
"""The header with the most tokens that an answer has, if its request asked for more than fit."""


class NotBrief(Exception):
    """The work would take too long on the event loop."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a route knows of a request, and what it notes for the answer.

    `services` are those of the base that answers. `ignored` names what in the request binds nothing; a header
    lists it. `answer_headers` are added to the answer's headers until these are sent. `defaults` are those of
    the adapter that answers, and `variant` is its way to chat if that is not the base's. `background` is for
    requests that run after all others.
    """

    services: Services
    caller: Caller = field(default_factory=lambda: Caller(LOCAL_ADMIN))
    headers: HeaderOptions = NO_OPTIONS
    ignored: list[str] = field(default_factory=list)
    answer_headers: dict[str, str] = field(default_factory=dict)
    defaults: RequestDefaults = NO_DEFAULTS
    variant: Family | None = None
    background: bool = False

    @property
    def client(self) -> EngineClient:
        """The engine of the base that answers."""
        return self.services.client

    @property
    def settings(self) -> ApiSettings:
        """The settings of the base that answers."""
        return self.services.settings

    @property
    def family(self) -> Family:
        """How the model that answers chats."""
        return self.variant or self.services.family

    @property
    def base(self) -> str:
        """The base model's name."""
        return next(iter(self.client.models(self.caller.tenant)))

    @property
    def bases(self) -> set[str]:
        """All names of the base."""
        cards = self.client.models(self.caller.tenant)
        return {name for name, card in cards.items() if card.adapter is None}

    def with_services(self, services: Services) -> "Exchange":
        """The exchange, if the base of these services answers it."""
        return self if services is self.services else replace(self, services=services)

    def deadline(self, timeout: float | None) -> float:
        """When a request ends at the latest, by its own `timeout`, its header and the server's limit.

        Raises RequestError for an invalid timeout.
        """
        arrived = anyio.current_time() if self.headers.arrived is None else self.headers.arrived
        limits = [timeout if timeout is None else seconds(timeout, "timeout"), self.settings.request_timeout]
        ends = (arrived + limit for limit in limits if limit is not None)
        return min(self.headers.patience, *ends, math.inf)

    def shrunk(self, asked: int | None, left: int) -> int | None:
        """`asked` tokens of an answer, or what is `left` if that is less; a header says so. Without room for
        one token it stays as it is, and is refused."""
        if asked is None or not 0 < left < asked:
            return asked
        self.answer_headers[CLAMPED] = str(left)
        return left

    def keep(self, size: int) -> None:
        """Count memory that the request needs until it has ended, in addition to its body. Raises
        RateLimited."""
        hold = self.services.bodies.hold(self.caller.identity)
        self.caller.until_done.callback(hold.shrink)
        hold.grow(size)

    async def take_turn(self) -> None:
        """Wait for the tenant's turn at the workers. The request has it until it is ready for the engine."""
        caller = self.caller
        caller.turn = turn = await self.services.workers.turn(caller.tenant, caller.body_size)
        caller.until_ready.callback(turn.end)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, in the request's turn or in a turn of its own."""
        if self.caller.turn is not None:
            return await self.caller.turn.run(work)
        return await self.services.workers.run(self.caller.tenant, work)

    async def prepared(self, prepare: Callable[[bool], T]) -> T:
        """The result of `prepare(brief)`: at once if the request is brief, else in a thread.

        Work that turns out not to be brief raises TemplateTooSlow or NotBrief, and starts again in a thread.
        """
        if self.caller.turn is None and self.caller.body_size <= LONG:
            with suppress(TemplateTooSlow, NotBrief):
                return self.services.workers.on_loop(self.caller.tenant, partial(prepare, True))
        return await self.off_loop(partial(prepare, False))


def exchange_of(request: Request) -> Exchange:
    """The exchange of this request. Raises RequestError for a header that is invalid."""
    services: Services = request.app.state.services
    headers = header_options(request)
    if not hasattr(request.state, "ignored"):
        request.state.ignored = []
        request.state.answer_headers = {}
    refuses = headers.targets is not None and headers.targets.refuse
    if refuses and services.scaler is None and REFUSE not in request.state.ignored:
        request.state.ignored.append(REFUSE)  # one engine takes every request as it comes
    return Exchange(
        services, caller_of(request), headers, request.state.ignored, request.state.answer_headers
    )
