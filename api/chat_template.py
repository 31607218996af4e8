"""Renders chat templates: from messages to the prompt's text.

The templates are Jinja programs that come with a model, written for Hugging Face's `apply_chat_template`.
https://huggingface.co/docs/transformers/chat_templating_writing describes what they may rely on. They run in
Jinja's immutable sandbox and see plain JSON data only. A client's own template runs only if the server was
configured to trust it.

A template may loop for ever, and the client's input determines how often it does. So every iteration of a
loop and every piece of output checks the clock. Products and powers are bounded as well.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from personae.api.generic_tools import with_tools
from personae.api.wire.conversation import (
    AssistantMessage,
    Content,
    FunctionMessage,
    Message,
    PastToolCall,
    RefusalPart,
    TextPart,
)
from personae.errors import ModelLoadError, RequestError, TemplateTooSlow, UnsupportedParameter
from personae.grammar.tools.custom import CUSTOM_INPUT

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an earlier answer's reasoning. Templates read the first or the second."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_ENDS: ContextVar[float] = ContextVar("ends")  # when the running template must have ended
SECONDS = 10.0
CHARACTERS = 2**24
_LARGEST = 2**64  # the largest number in a product
_LARGEST_POWER = 64
_MARK = "PERSONAE_CONTINUES_HERE "
"""Ends the message to be continued while the template runs. Its blank shows whether the template trims."""


class PromptTooLong(Exception):
    """The template has written more than the caller can use."""


def takes_tools(source: str) -> bool:
    """Whether a template uses the tools of a request at all."""
    try:
        tree = _environment().parse(source)
        return "tools" in meta.find_undeclared_variables(tree)
    except TemplateError as error:
        raise ModelLoadError(f"The model's chat template is not valid Jinja: {error}.") from None


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as `bos_token`, and their
    texts.

    `generic_tools`: the template gets no tools; the messages describe them. It is limited to `seconds` and
    `characters`, which are checked in every iteration of a loop and between any two pieces of output. Raises
    ModelLoadError if the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
        generic_tools: bool = False,
    ) -> None:
        self.source = source
        self._seconds = seconds
        self._characters = characters
        environment = _environment()
        environment.filters["tojson"] = _tojson
        environment.filters["items"] = _items
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"The model's chat template is not valid Jinja: {error}.") from None
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._generic_tools = generic_tools
        self._shows_system = not generic_tools or self._shows("system")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        seconds: float | None = None,
        characters: int | None = None,
    ) -> str:
        """The prompt for `messages`. With `continue_final_message` it ends within the last message's content.

        `kwargs` are more variables for the template, `tools` those that the model may call, `seconds` a
        shorter time limit than usual. Raises TemplateTooSlow, PromptTooLong as soon as there are more than
        `characters`, and RequestError if the template refuses the messages or fails on them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` needs `add_generation_prompt` to be false.",
                param="continue_final_message",
            )
        extra = dict(kwargs or {})
        for name in sorted(extra.keys() & (_RESERVED | self._special_tokens.keys())):
            raise RequestError(
                f"`{name}` cannot be set through `chat_template_kwargs`.",
                param=f"chat_template_kwargs.{name}",
            )
        chat = plain_messages(messages)
        if not self._knows_developer:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        if self._generic_tools:
            chat, tools = with_tools(chat, tools, system=self._shows_system), None
        final = self._mark_final(chat) if continue_final_message else None
        token = _ENDS.set(time.perf_counter() + (self._seconds if seconds is None else seconds))
        try:
            prompt = self._shown(
                characters,
                chat,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **extra,
            )
        finally:
            _ENDS.reset(token)
        return prompt if final is None else _cut(prompt, final)

    def _shown(self, characters: int | None, chat: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt. A template that cannot handle messages without content, or malformed arguments, gets
        them in a form that it can."""
        calls = [call["function"] for message in chat for call in message.get("tool_calls", ())]
        malformed = [call for call in calls if isinstance(call["arguments"], MalformedArguments)]
        silent = [message for message in chat if "content" not in message]
        try:
            prompt = self._write(characters, messages=chat, **variables)
        except (TemplateTooSlow, PromptTooLong):
            raise
        except Exception as error:  # a template is a program: unusual messages can make it fail in any way
            if not malformed and not silent:
                raise RequestError(
                    f"The chat template refuses these messages: {error}", param="messages"
                ) from error
        else:
            if all(call["arguments"] in prompt for call in malformed):
                return prompt
        if silent:
            for message in silent:
                message["content"] = ""
        else:
            for call in malformed:
                call["arguments"] = dict(call["arguments"].items())
        return self._shown(characters, chat, **variables)

    def _shows(self, role: str) -> bool:
        """Whether a first message with that role gets into the prompt."""
        chat = [{"role": role, "content": _MARK}, {"role": "user", "content": "?"}]
        token = _ENDS.set(time.perf_counter() + self._seconds)
        try:
            shown = self._write(None, messages=chat, tools=None, documents=None, **self._special_tokens)
            return _MARK.strip() in shown
        except Exception:  # a template is a program: it can fail in any way
            return False
        finally:
            _ENDS.reset(token)

    def _write(self, characters: int | None, **variables: Any) -> str:
        """What the template writes. Raises TemplateError beyond the template's own limit, PromptTooLong and
        TemplateTooSlow."""
        pieces, length = [], 0
        for piece in self._template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if characters is not None and length > characters:
                raise PromptTooLong
            if length > self._characters:
                raise TemplateError(f"the prompt has more than {self._characters} characters")
            _look_at_the_clock()
        return "".join(pieces)

    @staticmethod
    def _mark_final(chat: list[dict[str, Any]]) -> str:
        final = chat[-1].get("content")
        if final is None:
            raise RequestError(
                "`continue_final_message` needs content in the last message.", param="continue_final_message"
            )
        chat[-1]["content"] = final + _MARK
        return str(final)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, tool-call arguments as objects, nothing null.

    Text parts are joined by line breaks. Raises RequestError naming the part that is not text.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.__struct_config__.tag}
    if message.content is not None:
        plain["content"] = _text(message.content, f"{where}.content")
    if isinstance(message, FunctionMessage):  # templates know its newer form
        return {"role": "tool", "content": plain.get("content", ""), "name": message.name}
    if message.name is not None:
        plain["name"] = message.name
    if not isinstance(message, AssistantMessage):
        tool_call_id = getattr(message, "tool_call_id", None)
        return plain if tool_call_id is None else plain | {"tool_call_id": tool_call_id}
    if message.audio is not None:
        raise UnsupportedParameter(f"`{where}.audio` is not served.", param=f"{where}.audio")
    if message.refusal is not None:
        plain.setdefault("content", message.refusal)
    reasoning = [text for name in _REASONING if (text := getattr(message, name)) is not None]
    if reasoning:
        plain["reasoning_content"] = reasoning[0]
        plain["thinking"] = message.thinking if message.thinking is not None else reasoning[0]
    calls = [
        _tool_call(call, f"{where}.tool_calls[{index}]")
        for index, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        calls.append(_tool_call(PastToolCall(message.function_call), where))
    if calls:
        plain["tool_calls"] = calls
    elif reasoning:
        plain.setdefault("content", "")
    elif "content" not in plain:
        raise RequestError(
            f"`{where}.content` is required where there are no `tool_calls`.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    return plain


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            raise UnsupportedParameter(
                f"`{where}[{index}]` is not text, and this model reads nothing else.",
                param=f"{where}[{index}].type",
            )
    return "\n".join(texts)


class MalformedArguments(str):
    """Malformed arguments that a model wrote, as a template sees them: text that is shown unchanged.

    A template that shows arguments one by one sees a single one, the text.
    """

    __slots__ = ()

    def items(self) -> list[tuple[str, str]]:
        """The text as the only argument."""
        return [("arguments", str(self))]


def _items(value: Any) -> Any:
    """Jinja's filter of that name."""
    return value.items() if isinstance(value, MalformedArguments) else do_items(value)


def _tool_call(call: PastToolCall, where: str) -> dict[str, Any]:
    """A call as templates know it: always of a function. A call of a custom tool becomes one with its
    input."""
    arguments: Any = None
    if call.type == "custom" and call.custom is not None:
        name, arguments = call.custom.name, {CUSTOM_INPUT: call.custom.input}
    elif call.type == "function" and call.function is not None:
        name = call.function.name
        with suppress(ValueError, RecursionError):
            arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            arguments = MalformedArguments(call.function.arguments)
    else:
        param = f"{where}.{call.type}"
        raise RequestError(f"`{param}` is required.", param=param, code="missing_required_parameter")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain


def _cut(prompt: str, final: str) -> str:
    """The prompt up to the end of the marked message; without trailing blanks if the template trims them."""
    at = prompt.rfind(_MARK.strip())
    if at < 0 or final.strip() not in prompt:
        raise RequestError(
            "`continue_final_message`: this model's chat template does not render the last message as it is.",
            param="continue_final_message",
        )
    return prompt[:at] if prompt.startswith(_MARK, at) else prompt[:at].rstrip()


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
    raise TemplateError(message)


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


def _environment() -> _Environment:
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own text for training. Here only its body is
    used."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
