"""`personae serve` in a process of its own."""

import re
from typing import Any

import httpx
from patience import PATIENCE
from programs import Program, child

WORDS = 600  # tokens of an answer


class Served(Program):
    """A server process."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("-m", "personae", "serve", "--port", "0", *arguments)
        self.first = self.line()
        found = re.match(r"personae ready (\S+) model=(\S+)", self.first)
        self.url, self.model = (found[1], found[2]) if found else ("", "")

    def back(self) -> int:
        return child(self.process.pid)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def complete(self, **changes: Any) -> httpx.Response:
        body = self.body(stream=False, **changes)
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)

    def body(self, **changes: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": "Once", "seed": 4, "ignore_eos": True, "max_tokens": WORDS}
        return {**body, "stream": True, **changes}
