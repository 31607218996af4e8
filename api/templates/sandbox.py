"""The sandbox in which chat templates run.

The templates are Jinja programs that come with a model, written for Hugging Face's `apply_chat_template`.
https://huggingface.co/docs/transformers/chat_templating_writing describes what they may rely on. They run in
Jinja's immutable sandbox and see plain JSON data only.

A template may loop for ever, and the client's input determines how often it does. So every iteration of a
loop and every piece of output checks the clock. Products and powers are bounded as well.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from personae.api.templates.messages import MalformedArguments
from personae.errors import ModelLoadError, RequestError, TemplateTooSlow

_ENDS: ContextVar[float] = ContextVar("ends")  # when the running template must have ended
SECONDS = 10.0
CHARACTERS = 2**24
_LARGEST = 2**64  # the largest number in a product
_LARGEST_POWER = 64
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class PromptTooLong(Exception):
    """The template has written more than the caller can use."""


class Refusal(TemplateError):
    """The template itself refuses a conversation, in its own words."""


class Program:
    """A compiled template. Raises ModelLoadError if the source is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, characters: int) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.filters["items"] = _items
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateError as error:
            raise ModelLoadError(f"The model's chat template is not valid Jinja: {error}.") from None
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        self._variables = meta.find_undeclared_variables(tree) - own - environment.globals.keys()
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._characters = characters

    @property
    def unset(self) -> list[str]:
        """The variables that nobody sets, unless a request does."""
        return sorted(self._variables - _GIVEN - self.special_tokens.keys())

    def write(self, most: int | None, **variables: Any) -> str:
        """What the template writes, inside `within`.

        Raises RequestError beyond the template's own limits of time and characters, PromptTooLong beyond
        `most` characters, Refusal, and whatever else a program can raise.
        """
        pieces, length = [], 0
        for piece in self._template.generate(documents=None, **self.special_tokens, **variables):
            pieces.append(piece)
            length += len(piece)
            if most is not None and length > most:
                raise PromptTooLong
            if length > self._characters:
                raise RequestError(
                    f"The chat template writes more than {self._characters} characters.", param="messages"
                )
            _look_at_the_clock()
        return "".join(pieces)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The templates that run inside end after `seconds`, or raise TemplateTooSlow."""
    token = _ENDS.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _ENDS.reset(token)


def _items(value: Any) -> Any:
    """Jinja's filter of that name."""
    return value.items() if isinstance(value, MalformedArguments) else do_items(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as text; Jinja's own filter escapes for HTML."""
    if isinstance(value, MalformedArguments):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def _look_at_the_clock() -> None:
    if time.perf_counter() > _ENDS.get():
        raise TemplateTooSlow("The chat template takes too long on these messages.", param="messages")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox. Its loops check the clock in every iteration."""

    turn = staticmethod(_look_at_the_clock)
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A product or a power. One that is too large is refused before it is computed."""
        if operator == "**" and not (abs(left) <= _LARGEST and abs(right) <= _LARGEST_POWER):
            raise TemplateError("a power is too large")
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    if len(one) * times > CHARACTERS:
                        raise TemplateError("a product is too large")
                elif isinstance(one, int) and abs(one) > _LARGEST:
                    raise TemplateError("a product is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            call = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            turn = nodes.ExprStmt(call).set_lineno(loop.lineno).set_environment(self)
            loop.body.insert(0, turn)
        return template


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own text for training. Here only its body is
    used."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
