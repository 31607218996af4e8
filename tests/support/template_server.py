"""A server whose model has the chat template of a real one."""

from typing import Any

import asgi
from fake_engine import FakeEngine, byte_tokenizer
from template_matrix import templates

from personae.api.app import create_app

SOURCES = {path.stem: path for path in templates()}


class Served:
    """A scripted engine behind the whole API, with a model's chat template."""

    def __init__(self, template: str, answer: str = "fine") -> None:
        self.engine = FakeEngine(answer, tokenizer=byte_tokenizer(template), max_model_len=65_536)
        self._app = create_app(self.engine)
        self.headers: dict[str, str] = {}

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """The status and the answer of a request."""
        async with asgi.client(self._app) as client:
            limit = {"max_tokens": 900} if path in ("/v1/chat/completions", "/v1/messages") else {}
            response = await client.post(path, json={"model": "base", **limit, **body})
        self.headers = dict(response.headers)
        return response.status_code, response.json()

    async def chat(self, messages: list[Any], **body: Any) -> Any:
        """The answer's message."""
        status, answer = await self.post("/v1/chat/completions", messages=messages, **body)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def prompt(self, messages: list[Any], **body: Any) -> str:
        """The prompt of a chat completion."""
        await self.chat(messages, **body)
        return self.last_prompt

    @property
    def last_prompt(self) -> str:
        """The newest prompt."""
        log = self.engine.submitted[-1]
        return self.engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)
