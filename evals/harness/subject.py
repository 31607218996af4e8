"""One model of one target in one mode, as a suite's case uses it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio

from personae.errors import Overloaded, RateLimited
from personae.evals.harness.target import Body, Target

TRIES = 8
LONGEST_PAUSE = 30.0


@dataclass(slots=True)
class CaseUsage:
    """The tokens of a case's answers."""

    prompt: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """`sampling` are the fields of every request (temperature, seed), unless the case sets its own."""

    target: Target
    model: str
    base: bool
    mode: str
    sampling: Body
    usage: CaseUsage = field(default_factory=CaseUsage)

    async def chat(self, messages: list[Body], **fields: Any) -> Body:
        """Answer a conversation. Retries while the server is full."""
        return await self._ask(self.target.chat, {"messages": messages, **fields})

    async def complete(self, prompt: str | list[int], **fields: Any) -> Body:
        """Continue a prompt. Retries while the server is full."""
        return await self._ask(self.target.complete, {"prompt": prompt, **fields})

    def stream_chat(self, messages: list[Body], **fields: Any) -> AsyncIterator[Body]:
        """The chunks of an answer to a conversation."""
        return self.target.stream_chat({"model": self.model, **self.sampling, "messages": messages, **fields})

    async def _ask(self, how: Any, fields: Body) -> Body:
        pause = 1.0
        for attempt in range(1, TRIES + 1):
            try:
                answer: Body = await how({"model": self.model, **self.sampling, **fields})
                break
            except (Overloaded, RateLimited) as error:
                if attempt == TRIES:
                    raise
                pause = min(LONGEST_PAUSE, max(2 * pause, error.retry_after or 0.0))
                await anyio.sleep(pause)
        usage = answer.get("usage") or {}
        self.usage.prompt += usage.get("prompt_tokens", 0)
        self.usage.completion += usage.get("completion_tokens", 0)
        return answer
