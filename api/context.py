"""The context of a request: the app's parts, the caller, and what prompts need."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec
from starlette.requests import Request

from personae.actors.client import EngineClient, ModelCard
from personae.api.adapters.combined import combined
from personae.api.adapters.defaults import RequestDefaults, decode_defaults
from personae.api.console.history import LiveHistory
from personae.api.console.kept import KeptAnswer
from personae.api.deadline import arrival, header_deadline, seconds
from personae.api.family import Family
from personae.api.sessions.store import SessionStore, session_key
from personae.api.settings import ApiSettings
from personae.api.targets import REFUSE, session_of, targets_of
from personae.api.telemetry.metrics import Metrics
from personae.api.telemetry.tracing import UNTRACED, Tracing
from personae.api.tenants.access import LOCAL_ADMIN, Caller, caller_of
from personae.api.tenants.bodies import BodyBudget
from personae.api.tenants.limits import Meter
from personae.api.tenants.revocations import Revocations
from personae.api.tenants.workers import Workers
from personae.api.wire.conversation import DeveloperMessage, Message, SystemMessage, check_results
from personae.api.wire.decode import LONG
from personae.api.wire.schema import Sampling
from personae.engine.sequence import LatencyTargets
from personae.errors import (
    ModelLoadError,
    NotFound,
    RequestError,
    TemplateTooSlow,
    UnsupportedParameter,
)
from personae.grammar.fuzzy_match import nearest
from personae.lora.mix_id import parts_of

if TYPE_CHECKING:
    from personae.actors.replicas.scaling import ReplicaScaler
    from personae.api.adapters.registry import AdapterRecord, Registry
    from personae.api.base_models.base_models import BaseModels
    from personae.api.responses.store import ResponseStore
    from personae.api.tenants.budgets import Budgets
    from personae.api.tenants.store import TenantStore
    from personae.api.tenants.usage import UsageLedger

T = TypeVar("T")

_BRIEF_SECONDS = 0.02
"""The time of the event loop that a template may use."""

_SHIFTED = re.compile(r"\bmessages\[(\d+)\]")

NO_DEFAULTS = RequestDefaults()

ADAPTER = "x-personae-adapter"
"""The header with the exact version of the adapter that answers, as `poet@2`."""

CLAMPED = "x-personae-max-tokens"
"""The header with the most tokens that an answer has, if its request asked for more than fit."""

_MOST_VARIANTS = 64
_LONGEST_COMPARED, _MOST_COMPARED = 64, 16
"""For an unknown model's name: its characters, and how many names of about that length it is compared
with."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What every route needs: the app's parts, and the caller.

    `registry` has the adapters that were added while the server runs; None if there is no place for them.
    `tenants` are those who may send requests, `usage` records what they use,
    `responses` are the stored ones; `revocations` ends what runs for a revoked key; `scaler` adds and removes
    engines. `base_models` has all bases of a server with several; the context is that of one of them.
    `live` is the last answer of `/v1/stats`. `budgets` bounds what they use in a day. `background`
    requests run after all others. `arrived` is when the request arrived, None for now; `patience` is when its
    client has no more use for the answer. Both are on `anyio.current_time`'s clock. `fingerprint` changes
    when the server could answer differently than before. `ignored` names what in the request binds nothing; a
    header lists it. `targets` and `session` come from the request's headers; `sessions` has what is known of
    sessions. `answer_headers` are added to the answer's headers until these are sent. `defaults` are those of
    the adapter that answers; see `with_defaults`.
    """

    client: EngineClient
    settings: ApiSettings
    metrics: Metrics
    family: Family
    meter: Meter
    tracing: Tracing = UNTRACED
    workers: Workers = field(default_factory=Workers)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    revocations: Revocations = field(default_factory=Revocations)
    live: KeptAnswer = field(default_factory=KeptAnswer)
    history: LiveHistory = field(default_factory=LiveHistory)
    registry: "Registry | None" = None
    tenants: "TenantStore | None" = None
    usage: "UsageLedger | None" = None
    budgets: "Budgets | None" = None
    responses: "ResponseStore | None" = None
    scaler: "ReplicaScaler | None" = None
    base_models: "BaseModels | None" = None
    caller: Caller = field(default_factory=lambda: Caller(LOCAL_ADMIN))
    arrived: float | None = None
    patience: float = math.inf
    ignored: list[str] = field(default_factory=list)
    targets: LatencyTargets | None = None
    session: str | None = None
    sessions: SessionStore = field(default_factory=lambda: SessionStore(0))
    answer_headers: dict[str, str] = field(default_factory=dict)
    defaults: RequestDefaults = NO_DEFAULTS
    background: bool = False
    fingerprint: str = ""

    @property
    def base(self) -> str:
        """The base model's name."""
        return next(iter(self.client.models(self.caller.tenant)))

    @property
    def bases(self) -> set[str]:
        """All names of the base."""
        cards = self.client.models(self.caller.tenant)
        return {name for name, card in cards.items() if card.adapter is None}

    def models(self) -> list[ModelCard]:
        """Every name that the caller may use in `model`: the base, adapters of the server's start, and later
        ones."""
        cards, bases = dict(self.client.models(self.caller.tenant)), self.bases
        for record in self.registry.list(self.caller.tenant) if self.registry else ():
            if record.base_model in bases:
                cards.setdefault(record.name, record.card())
        for alias in self.registry.aliases.list(self.caller.tenant) if self.registry else ():
            cards.setdefault(alias.name, ModelCard(alias.name, "", alias.created, self.base))
        return list(cards.values())

    def answered_by(self, other: "RequestContext") -> "RequestContext":
        """This request's context, if the base of another context answers it."""
        if self.client is other.client:
            return self
        return replace(
            self,
            client=other.client,
            settings=other.settings,
            family=other.family,
            fingerprint=other.fingerprint,
        )

    def chosen(self, body: Sampling) -> ModelCard:
        """What answers the request: `model`, or the base with all of `adapters`. Raises NotFound or
        RequestError."""
        who = self._session_key(body)
        card = self.model(self.named(body.model), key=who)
        if not body.adapters:
            if card.version is not None:
                self.answer_headers[ADAPTER] = card.version
            return card
        entries = enumerate(body.adapters)
        parts = [(self.model(entry.name, f"adapters[{i}].name", who), entry.weight) for i, entry in entries]
        return combined(card, parts, self.settings.max_rank)

    def _session_key(self, body: Sampling) -> str | None:
        """What keeps a session or an end user with the same choice of an alias. None if the request names
        neither."""
        named = (getattr(body, field, None) for field in ("prompt_cache_key", "safety_identifier"))
        session = None if self.session is None else session_key(self.session)
        return next((key for key in (session, *named, body.user) if isinstance(key, str) and key), None)

    def named(self, name: str | None) -> str:
        """The name of the model that a request asks for, or the default."""
        return name if name is not None else self.settings.default_model or self.base

    def model(self, name: str, param: str = "model", key: str | None = None) -> ModelCard:
        """The base or the adapter of that name, held until the request has ended; of an alias what it chooses
        for `key`. Raises NotFound."""
        own = name in self.client.models(self.caller.tenant)
        if not own and self.registry is not None:
            alias = self.registry.aliases.find(self.caller.tenant, name)
            if alias is not None:
                return msgspec.structs.replace(self._model(alias.choose(key), param), alias=name)
        return self._model(name, param)

    def _model(self, name: str, param: str) -> ModelCard:
        card = self.client.models(self.caller.tenant).get(name)
        if card is None and (record := self._uploaded(name)) is not None and self.registry is not None:
            self.caller.until_done.enter_context(self.registry.hold(record.sha256))
            card = record.card(name)
        if card is None:
            meant = self._meant(name)
            hint = "; /v1/models lists those that do." if meant is None else f". Did you mean `{meant}`?"
            raise NotFound(
                f"The model `{name[:100]}` does not exist{hint}", param=param, code="model_not_found"
            )
        return card

    async def with_defaults(self, card: ModelCard) -> "RequestContext":
        """The context for a request that this model answers: with its defaults, and its way to chat."""
        defaults = decode_defaults(card.defaults)
        return self if defaults == NO_DEFAULTS else await self.defaulting(defaults)

    async def defaulting(self, defaults: RequestDefaults) -> "RequestContext":
        """The context with these defaults. Raises RequestError for a format or a template that is invalid."""
        key = tuple(map(defaults.get, ("tool_format", "reasoning_format", "chat_template")))
        family, variants = self.family, self.family.variants
        if any(key):
            if key not in variants:
                made = await self.off_loop(partial(self._variant, *key))
                if len(variants) >= _MOST_VARIANTS:
                    variants.clear()
                variants[key] = made
            family = variants[key]
        return replace(self, defaults=defaults, family=family)

    def _variant(self, tools: str | None, reasoning: str | None, template: str | None) -> Family:
        settings = self.settings
        try:
            family = Family.of(
                self.client.tokenizer, tools or settings.tool_format, reasoning or settings.reasoning_format
            )
        except ModelLoadError as error:
            raise RequestError(error.message, param="tool_format" if tools else "reasoning_format") from None
        return family if template is None else family.with_template(template)

    async def bring(self, adapter: str | None) -> None:
        """Have an adapter's files here, or those of a mix. Raises StorageFailed."""
        if self.registry is not None and adapter is not None and self.registry.travels:
            for digest, _ in parts_of(adapter) or [(adapter, 1.0)]:
                await self.registry.bring(digest)

    def _uploaded(self, name: str) -> "AdapterRecord | None":
        record = None if self.registry is None else self.registry.find(self.caller.tenant, name)
        here = record is not None and (record.base_model == self.base or record.base_model in self.bases)
        return record if here else None

    def _meant(self, name: str) -> str | None:
        """The model that was probably meant: without the prefix that other servers use (`base:poet`,
        `owner/poet`), in lower case, or with a similar spelling. Only some names are compared, because there
        may be very many."""
        last = name.rpartition("/")[2].rpartition(":")[2].strip()
        known = self.client.models(self.caller.tenant)
        guesses = (last, last.lower())
        found = next((one for one in guesses if one in known or self._uploaded(one) is not None), None)
        if found is not None or len(name) > _LONGEST_COMPARED:
            return found
        uploaded = (one.name for one in self.registry.list(self.caller.tenant)) if self.registry else ()
        similar = (one for one in chain(known, uploaded) if abs(len(one) - len(name)) <= 2)
        return nearest(name, islice(similar, _MOST_COMPARED))

    def deadline(self, timeout: float | None) -> float:
        """When a request ends at the latest, by its own `timeout`, its header and the server's limit.

        Raises RequestError for an invalid timeout.
        """
        arrived = anyio.current_time() if self.arrived is None else self.arrived
        limits = [timeout if timeout is None else seconds(timeout, "timeout"), self.settings.request_timeout]
        return min(self.patience, *(arrived + limit for limit in limits if limit is not None), math.inf)

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
        hold = self.bodies.hold(self.caller.identity)
        self.caller.until_done.callback(hold.shrink)
        hold.grow(size)

    async def take_turn(self) -> None:
        """Wait for the tenant's turn at the workers. The request has it until it is ready for the engine."""
        caller = self.caller
        caller.turn = turn = await self.workers.turn(caller.tenant, caller.body_size)
        caller.until_ready.callback(turn.end)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, in the request's turn or in a turn of its own."""
        if self.caller.turn is not None:
            return await self.caller.turn.run(work)
        return await self.workers.run(self.caller.tenant, work)

    async def prepared(self, prepare: Callable[[bool], T]) -> T:
        """The result of `prepare(brief)`: at once if the request is brief, else in a thread.

        Work that turns out not to be brief raises TemplateTooSlow or NotBrief, and starts again in a thread.
        """
        if self.caller.turn is None and self.caller.body_size <= LONG:
            with suppress(TemplateTooSlow, NotBrief):
                return self.workers.on_loop(self.caller.tenant, partial(prepare, True))
        return await self.off_loop(partial(prepare, False))

    def encode(
        self,
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
        return self.client.tokenizer.encode_batch(texts, add_special_tokens, most, first, limit)

    def decode(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool, brief: bool) -> list[str]:
        """The text of each list of ids. Raises NotBrief."""
        if brief and sum(map(len, lists)) > LONG:
            raise NotBrief
        return self.client.tokenizer.decode_batch(lists, skip_special_tokens)

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        """Raises RequestError naming the first id that is not a token of this model."""
        vocab = self.client.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            place = next(place for place, token in enumerate(ids) if not 0 <= token < vocab)
            field = f"{name}[{place}]"
            raise RequestError(
                f"`{field}` is no token of this model; ids are from 0 to {vocab - 1}.", param=field
            )

    def render_chat(
        self,
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
        family, system = self.family, self.defaults.get("system")
        if chat_template is not None:
            if not self.settings.trust_request_chat_template:
                raise UnsupportedParameter(
                    "`chat_template` is not served here: the server needs --trust-request-chat-template.",
                    param="chat_template",
                )
            if brief:
                raise NotBrief
            family = family.with_template(chat_template)
        if not messages:
            raise RequestError("`messages` is empty.", param="messages")
        if len(messages) > self.settings.max_messages:
            raise RequestError(f"`messages` may have at most {self.settings.max_messages}.", param="messages")
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
        self.ignored.extend(name for name in left_out if name not in self.ignored)
        return prompt


def _without_first(text: str) -> str:
    """What is said of a conversation, for one without its first message."""
    return _SHIFTED.sub(lambda found: f"messages[{max(int(found[1]) - 1, 0)}]", text)


class NotBrief(Exception):
    """The work would take too long on the event loop."""


def context_of(request: Request) -> RequestContext:
    """The app's context, for this request's caller."""
    context: RequestContext = request.app.state.context
    arrived, patience = arrival(request), header_deadline(request)
    if not hasattr(request.state, "ignored"):
        request.state.ignored, request.state.answer_headers = [], {}
    targets = targets_of(request)
    refuses = targets is not None and targets.refuse
    if refuses and context.scaler is None and REFUSE not in request.state.ignored:
        request.state.ignored.append(REFUSE)  # one engine takes every request as it comes
    return replace(
        context,
        caller=caller_of(request),
        arrived=arrived,
        patience=patience,
        targets=targets,
        session=session_of(request),
        ignored=request.state.ignored,
        answer_headers=request.state.answer_headers,
    )
