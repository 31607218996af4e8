"""What chat completions and completions have in common: from a checked request to the engine and back."""

import hashlib
import hmac
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from msgspec import UNSET
from starlette.types import Receive

from personae.actors.client import ModelCard
from personae.api.choices import Choice, Part
from personae.api.exchange import Exchange
from personae.api.params import sibling
from personae.api.sessions.store import Turn, session_key
from personae.api.telemetry import logs
from personae.api.telemetry.metrics import SequenceClock
from personae.api.wire.answers import AnswerDetails, CachedTokens, Usage, UsageExtension
from personae.api.wire.schema import Sampling
from personae.engine.params import SamplingParams
from personae.engine.plan import NOT_FINITE
from personae.engine.sequence import Delta, SequenceLog
from personae.errors import (
    GRAMMAR_DELAYED,
    GRAMMAR_TOO_SLOW,
    AdapterOverflow,
    BudgetTooSmall,
    Cancelled,
    DeadlineExceeded,
    GrammarDelayed,
    GrammarError,
    GrammarTooSlow,
    Overloaded,
    PersonaeError,
    RateLimited,
    RequestError,
    RequestFailed,
    Unauthorized,
)
from personae.grammar.schema.document import PARAMS
from personae.grammar.spec import GrammarSpec
from personae.lora.activation import activation_start
from personae.lora.mix_id import parts_of

T = TypeVar("T")
Sink = Callable[[Part], None]

MAX_PRIORITY = 16
_MAX_SALT = 256


@dataclass(slots=True)
class Job:
    """A request on its way through the engine: its logs, and a `Choice` for each, by sequence id.

    `bound_by` is the field that bound its answers, for the errors of its grammar. `rename` changes the names
    of fields in errors, if the client's request is not a chat completion. `asked` has, for each prompt, the
    number of answers and the most tokens of each. `session` is the session's name, `session_ttl` how long its
    keys and values are kept after the request; with `in_memory` they go to no disk.
    """

    id: str
    model: ModelCard
    exchange: Exchange
    arrived: float
    bound_by: str | None = None
    deadline: float = math.inf
    priority: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    logs: list[SequenceLog] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    moved: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    budget_param: str = "max_tokens"
    cache_salt: str | None = None
    session: str | None = None
    session_ttl: int = 0
    in_memory: bool = False
    rename: Callable[[RequestError], None] = lambda error: None

    @classmethod
    def begin(
        cls,
        exchange: Exchange,
        prefix: str,
        model: ModelCard,
        body: Sampling,
        *,
        bound_by: str | None = None,
    ) -> "Job":
        """A job without sequences; its id begins with `prefix`.

        Raises RequestError if the body's `timeout`, `priority` or `cache_salt` is invalid.
        """
        priority, salt = body.priority or 0, body.cache_salt
        if abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"`priority` is a number from -{MAX_PRIORITY} to {MAX_PRIORITY}; the lower, the earlier.",
                param="priority",
                code="out_of_range",
            )
        if salt is not None and not 0 < len(salt) <= _MAX_SALT:
            raise RequestError(f"`cache_salt` must have 1 to {_MAX_SALT} characters.", param="cache_salt")
        id, began = f"{prefix}{uuid.uuid4().hex}", time.perf_counter()
        deadline = exchange.deadline(body.timeout)
        session = exchange.headers.session or getattr(body, "prompt_cache_key", None)
        options = getattr(body, "prompt_cache_options", None)
        retention = getattr(body, "prompt_cache_retention", None)
        if session is None and options is not None:
            exchange.ignored.append("prompt_cache_options")
        job = cls(id, model, exchange, began, bound_by, deadline, priority, cache_salt=salt)
        job.in_memory = retention not in (None, "24h")
        if session is not None:
            job.session = session
            job.session_ttl = exchange.services.sessions.ttl_of(exchange.caller.tenant, session, options)
        return job

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        grammar: GrammarSpec | None,
        choices: Sequence[Choice],
        *,
        prompt_param: str,
    ) -> None:
        """Add one prompt with its sibling choices. The first is computed first and shares its pages.

        Raises RequestError for a token that the model has no embedding for: a tokenizer may know more ids.
        """
        client, caller = self.exchange.client, self.exchange.caller
        self._check_prompt(prompt, prompt_param)
        if grammar is not None:
            self._check_grammar(grammar)
        tokens, eos, salt = tuple(prompt), tuple(client.tokenizer.eos_ids), self._salt()
        if self.cache_salt is not None:
            salt = hmac.digest(salt, self.cache_salt.encode(), hashlib.sha256)
        adapter, start = self.model.adapter, 0
        if self.model.invocation:
            found = activation_start(tokens, self.model.invocation)
            adapter, start = (None, 0) if found is None else (adapter, found)
        self.prompt_tokens += len(tokens)
        self.asked.append((len(choices), params.max_tokens))
        first: str | None = None
        for index, choice in enumerate(choices):
            log = SequenceLog(
                id=f"{self.id}-{choice.index}",
                tokens=tokens,
                prompt_length=len(tokens),
                params=sibling(params, index),
                eos=eos,
                adapter=adapter,
                grammar=grammar,
                tenant=caller.tenant,
                salt=salt,
                after=first,
                background=self.exchange.background,
                adapter_start=start,
                priority=self.priority,
                weight=caller.identity.limits.weight or 1.0,
                targets=self.exchange.headers.targets,
                session=None if self.session is None else session_key(self.session),
                session_seconds=0.0 if params.pooling else self.session_ttl,
                in_memory=self.in_memory,
            )
            first = first or log.id
            self.logs.append(log)
            self.choices[log.id] = choice

    def _salt(self) -> bytes:
        """The tenant's salt, which a later tenant of the same name does not share."""
        who = self.exchange.caller.identity
        return self.exchange.client.salt(f"{who.tenant}~{who.since}" if who.since else who.tenant)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        client = self.exchange.client
        if prompt and not 0 <= min(prompt) <= max(prompt) < client.vocab_size:
            strange = next(token for token in prompt if not 0 <= token < client.vocab_size)
            text = client.tokenizer.token_text(strange)
            raise RequestError(
                f"`{param}` has the token {strange} ({text!r}), which this model does not have: "
                f"ids are from 0 to {client.vocab_size - 1}.",
                param=param,
            )

    def _check_grammar(self, grammar: GrammarSpec) -> None:
        """Check the grammar's size, and the tenant's limit on new ones."""
        settings = self.exchange.settings
        most = settings.max_choice_bytes if grammar.kind == "choice" else settings.max_grammar_bytes
        if len(grammar.source) > most:
            raise RequestError(
                f"What binds the answer has more than {most} characters; make it simpler.",
                param=self.bound_by,
                code="grammar_too_large",
            )
        self.exchange.services.meter.schema(self.exchange.caller.identity, grammar.source)

    async def run(self, sink: Sink, admitted: Callable[[], None] = lambda: None) -> None:
        """Pass every part to `sink` as it arrives, until all choices have ended. `admitted` is called when
        the engine has taken a request in which nothing is left to refuse. Grammars are compiled and adapters
        are read later, so a request with either is admitted when its first sequence begins to run.

        Raises RateLimited, the engine's refusal, DeadlineExceeded, and RequestFailed if a sequence could not
        be finished. However this ends, the engine has released the request by then.
        """
        metrics, who = self.exchange.services.metrics, self.exchange.caller.identity
        budgets, longest = self.exchange.services.budgets, self._longest()
        held = None if budgets is None else budgets.hold(who, self._priced(), self.prompt_tokens, longest)
        try:
            reserved = self.exchange.services.meter.tokens(
                who, self.prompt_tokens, longest, spare=self.exchange.background
            )
        except RateLimited:
            if held is not None:
                held.release()
            raise
        label = self._label()
        targets = self.exchange.headers.targets
        clocks = {
            log.id: SequenceClock(metrics, label, self.arrived, log.prompt_length, targets, who.tenant)
            for log in self.logs
        }
        logs.note(model=self.model.ran, answer=self.id)
        try:
            if self.model.version is not None:
                metrics.versions.labels(metrics.label(self.model.version), self.model.alias or "").inc()
            with (
                self.exchange.services.tracing.generation(self, clocks),
                metrics.answering(label, self.asked),
            ):
                await self._timed(clocks, sink, admitted)
        finally:
            reserved.settle(self.completion_tokens)
            if held is not None:
                held.release()

    def _longest(self) -> int:
        """The most tokens that all answers may have."""
        return sum(log.params.max_tokens for log in self.logs)

    def _priced(self) -> str:
        """The name by which the model has a price: without its version."""
        return self.model.ran.partition("@")[0] if self.model.version else self.model.name

    def _used(self) -> str | None:
        """What is recorded as used: None is the base; of several bases, the first."""
        bases = self.exchange.services.base_models
        if self.model.adapter is not None:
            return self.model.ran
        return None if bases is None or self.model.name == bases.first.name else self.model.name

    def _label(self) -> str:
        """The model's name in metrics, where the base has one name."""
        name = self.model.name if self.model.adapter is not None else self.exchange.base
        return self.exchange.services.metrics.label(name)

    async def _timed(
        self, clocks: dict[str, SequenceClock], sink: Sink, admitted: Callable[[], None]
    ) -> None:
        """Follow until the end or the deadline. The clocks record how it ended."""
        reason, turn = "error", self._begin_turn()
        try:
            with (
                anyio.CancelScope(deadline=self.deadline) as patience,
                self.exchange.services.revocations.watching(
                    self.exchange.caller.identity, patience.cancel
                ) as watched,
            ):
                await self._follow(clocks, sink, admitted)
            if patience.cancelled_caught:
                reason = "abort"
                if watched.revoked:
                    raise watched.error()
                raise DeadlineExceeded("The request's time was over before its answer was complete.")
        except (RequestError, Overloaded) as refusal:
            if not isinstance(refusal, GrammarTooSlow | GrammarDelayed | Unauthorized):
                clocks.clear()  # it never began
            self._place(refusal)
            raise
        except anyio.get_cancelled_exc_class():
            reason = "abort"
            raise
        finally:
            if clocks:
                self._count(clocks)
            if turn is not None:
                self._end_turn(turn, counts=bool(clocks))
            for clock in clocks.values():
                clock.end(reason)

    def _count(self, clocks: Mapping[str, SequenceClock]) -> None:
        """Record the usage in the log, the tenant's usage and the tenant's metrics."""
        who = self.exchange.caller.identity
        prompt, cached, completion = self.prompt_tokens, self.cached_tokens, self.completion_tokens
        logs.count(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
        if self.exchange.services.metrics.tenants is not None:
            self.exchange.services.metrics.tenants.ended(
                who.tenant, prompt=prompt, cached=cached, completion=completion
            )
        if self.exchange.services.usage is not None:
            adapter = self._used()
            seconds = 0.0 if self.model.adapter is None else sum(clock.ran() for clock in clocks.values())
            budgets = self.exchange.services.budgets
            spend = (
                0.0 if budgets is None else budgets.prices.cost(self._priced(), prompt, cached, completion)
            )
            self.exchange.services.usage.add(who, adapter, prompt, cached, completion, seconds, spend)

    def _begin_turn(self) -> Turn | None:
        """The request of its session begins, if it has one."""
        if self.session is None:
            return None
        return self.exchange.services.sessions.begin(
            self.exchange.caller.tenant, self.session, self.session_ttl
        )

    def _end_turn(self, turn: Turn, *, counts: bool) -> None:
        """The request of its session ends. What was asked for the session meanwhile is asked again: an engine
        that got the request later has not heard of it."""
        sessions, client, key = self.exchange.services.sessions, self.exchange.client, session_key(turn.name)
        if counts:
            prompt, cached, completion = self.prompt_tokens, self.cached_tokens, self.completion_tokens
            sessions.end(turn, prompt=prompt, cached=cached, completion=completion)
        else:
            sessions.withdraw(turn)
        if turn.deleted:
            client.forget_session(turn.tenant, key)
        elif turn.changed:
            client.keep_session(turn.tenant, key, turn.ttl)

    def _place(self, refusal: RequestError | Overloaded) -> None:
        """Rename the fields in an engine's refusal to those of the client."""
        if isinstance(refusal, GrammarError) and refusal.param in (None, *PARAMS.values()):
            refusal.param = self.bound_by  # a grammar knows its kind, but not the field that it came from
        if isinstance(refusal, BudgetTooSmall):
            refusal.message = f"`{self.budget_param}` is too small. {refusal.message}"
            refusal.param = self.budget_param
        if isinstance(refusal, RequestError):
            self.rename(refusal)

    def add_counts(self, later: "Job") -> None:
        """Count what a later job of the same answer needed as this one's, for `usage`."""
        self.prompt_tokens += later.prompt_tokens
        self.cached_tokens += later.cached_tokens
        self.completion_tokens += later.completion_tokens
        self.reasoning_tokens += later.reasoning_tokens
        self.drafted += later.drafted
        self.accepted += later.accepted
        self.moved += later.moved

    async def probe(self) -> None:
        """Compile the first sequence's grammar, and withdraw the sequence before it writes anything. Raises
        what `run` raises before the first token."""
        self.exchange.services.meter.tokens(self.exchange.caller.identity, self.prompt_tokens, 0)
        try:
            await self._bring_adapter()
            async with self.exchange.client.stream(self.logs[:1]) as stream:
                async for _ in stream:
                    break
        except (RequestError, Overloaded) as refusal:
            self._place(refusal)
            raise

    async def _bring_adapter(self) -> None:
        """Have the adapter's files here, or those of a mix. Raises StorageFailed."""
        registry, adapter = self.exchange.services.registry, self.logs[0].adapter
        if registry is not None and adapter is not None and registry.files.travel:
            for digest, _ in parts_of(adapter) or [(adapter, 1.0)]:
                await registry.files.bring(digest)

    async def _follow(
        self, clocks: Mapping[str, SequenceClock], sink: Sink, admitted: Callable[[], None]
    ) -> None:
        failure: PersonaeError | None = None
        leaders = {log.id for log in self.logs if log.after is None}
        live = len(self.logs)
        await self._bring_adapter()
        async with self.exchange.client.stream(self.logs) as stream:
            self.exchange.services.metrics.prompt_tokens.labels(self._label()).inc(self.prompt_tokens)
            begun = all(log.grammar is None and log.adapter is None for log in self.logs)
            if begun:
                admitted()

            def record(delta: Delta, part: Part) -> None:
                if part.cached and delta.id in leaders:
                    self.cached_tokens += part.cached
                self.completion_tokens += len(part.tokens)
                if delta.drafted is not None:
                    self.drafted += delta.drafted[0]
                    self.accepted += delta.drafted[1]
                self.reasoning_tokens += part.reasoned
                if part.moved:
                    self._note_move(part.moved)
                clocks[delta.id].saw(part)
                sink(part)

            def take(delta: Delta) -> bool:
                """Take a delta that ends nothing."""
                choice = self.choices[delta.id]
                if delta.finish is not None or choice.may_stop or not begun:
                    return False
                record(delta, choice.take(delta))
                return True

            stream.take_at_once(take)
            async for delta in stream:
                if not begun:
                    begun = True
                    admitted()
                choice = self.choices[delta.id]
                if choice.ended:
                    continue
                if delta.finish == "error":
                    failure = self._failed(delta.error or "engine error", delta.code)
                    break
                part = choice.take(delta)
                if part.finish is not None:
                    live -= 1
                    if delta.finish is None:
                        stream.stop(delta.id)
                    await choice.judge(part)
                record(delta, part)
                if live == 0:
                    break
        if failure is not None:
            raise failure
        if live:
            raise RequestFailed("The engine ended the request before its answer was complete.")

    def _failed(self, why: str, code: str | None) -> PersonaeError:
        """The error for a client whose sequence cannot continue."""
        if code == GRAMMAR_TOO_SLOW:
            return GrammarTooSlow(f"The request could not be finished: {why}.")
        if code == GRAMMAR_DELAYED:
            return GrammarDelayed(f"The request could not be finished: {why}.")
        if why == NOT_FINITE and self.model.adapter is not None:  # the base's own weights are finite
            return AdapterOverflow(
                f"The adapter's values overflow with this prompt: {why}. Upload one with smaller updates."
            )
        return RequestFailed(f"The request could not be finished: {why}.")

    async def gather(self, receive: Receive) -> list[Part]:
        """Run to the end and return each complete choice, by index. Raises Cancelled if the client leaves."""
        whole = {choice.index: Part(choice.index) for choice in self.choices.values()}

        async def work() -> None:
            await self.run(lambda part: whole[part.index].add(part))

        await unless_disconnected(receive, work)
        return [whole[index] for index in sorted(whole)]

    def usage(self, *, before: bool = False) -> Usage:
        """The token counts so far. `before`: before any token was made."""
        said = 0 if before else self.completion_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=said,
            total_tokens=self.prompt_tokens + said,
            prompt_tokens_details=CachedTokens(self.cached_tokens),
            completion_tokens_details=self._details(0 if before else self.reasoning_tokens),
            personae=UsageExtension(self.moved) if self.moved else UNSET,
        )

    def _note_move(self, times: int) -> None:
        """A choice continued at an engine of another numerics class. A header says so if it is not too
        late."""
        self.moved += times
        self.exchange.answer_headers["x-personae-moved"] = str(self.moved)

    def _details(self, reasoned: int) -> AnswerDetails:
        if not any(log.params.prediction for log in self.logs):
            return AnswerDetails(reasoned)
        return AnswerDetails(reasoned, self.accepted, self.drafted - self.accepted)


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Await `work`, but cancel it when the client disconnects; then raise Cancelled.

    The request's body must have been read. An error of `work` is raised as it is, not in a group.
    """
    outcome: list[T] = []
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(listen)
        try:
            outcome.append(await work())
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not outcome:
        raise Cancelled("The client went away.")
    return outcome[0]
