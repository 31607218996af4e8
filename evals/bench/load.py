"""A closed-loop load on an OpenAI-compatible server, with a client so light that it hardly takes a core's
time.

Each of `concurrency` workers sends its next request when its last answer is complete. A streamed event counts
when its bytes arrive; tokens are those of the answer's `usage`.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """One request's outcome: seconds from sending to the first token and to the end, gaps between events."""

    tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What a load came to. Times in seconds."""

    concurrency: int
    requests: int
    errors: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_p50: float
    gap_p50: float
    gap_p99: float


async def complete(url: str, body: dict[str, Any]) -> Answer:
    """POST a streaming completion and read it to its end."""
    where = urlsplit(url)
    answer = Answer()
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    begun = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**20)
    try:
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            answer.error = (status + await reader.read()).decode(errors="replace")[:500]
            return answer
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])
                return answer
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            if event.get("choices") and event["choices"][0]["text"]:
                if answer.first is None:
                    answer.first = now - begun
                else:
                    answer.gaps.append(now - last)
                last = now
    except (OSError, ValueError) as error:
        answer.error = repr(error)
    finally:
        answer.seconds = time.perf_counter() - begun
        writer.close()
    return answer


async def closed_loop(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> Cell:
    """Send all bodies, `concurrency` at a time."""
    waiting: Iterator[dict[str, Any]] = iter(bodies)
    answers: list[Answer] = []

    async def worker() -> None:
        while (body := next(waiting, None)) is not None:
            answers.append(await complete(url, body))

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())
    seconds = time.perf_counter() - begun
    errors = [answer.error for answer in answers if answer.error]
    if len(errors) == len(answers):
        raise RuntimeError(f"every request failed, the first with: {errors[0]}")
    tokens = sum(answer.tokens for answer in answers)
    firsts = [answer.first for answer in answers if answer.first is not None]
    gaps = sorted(gap for answer in answers for gap in answer.gaps) or [0.0]
    return Cell(
        concurrency=concurrency,
        requests=len(answers),
        errors=len(errors),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        first_p50=statistics.median(firsts),
        gap_p50=gaps[len(gaps) // 2],
        gap_p99=gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))],
    )
