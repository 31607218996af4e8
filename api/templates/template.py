"""Renders chat templates: from messages to the prompt's text.

A template is asked once what it can show (probes.py). Each conversation is rewritten to that (rewrite.py).
A marked conversation of the same shape shows whether all of it gets into the prompt (marks.py). If it does
not, further rewritings are tried. If none helps, the request is refused, with the field that would be lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from personae.api.templates.marks import MARKED_TOOLS, Marked, marked, shape
from personae.api.templates.messages import MalformedArguments, plain_messages
from personae.api.templates.probes import find_traits
from personae.api.templates.rewrite import Chat, Tools, rewritten
from personae.api.templates.sandbox import CHARACTERS, SECONDS, Program, PromptTooLong, Refusal, within
from personae.api.templates.traits import TemplateTraits
from personae.api.wire.conversation import AssistantMessage, Message
from personae.errors import RequestError
from personae.grammar.reasoning.format import ReasoningFormat
from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.registry import GENERIC, tool_format

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MARK = "PERSONAE_CONTINUES_HERE "
"""Ends the message to be continued while the template runs. Its blank shows whether the template trims."""
_MOST_SHAPES, _MOST_TEMPLATES = 1024, 64
_CHANGES: tuple[dict[str, Any], ...] = (
    {"later_system": "joined in front"},
    {"system": "in the user's message"},
    {"several_calls": "split"},
    {"user_after_result": "joined to the result"},
    {"text_and_call": "split"},
    {"text_and_call": "the turn's text joined"},
    {"users": "joined", "assistants": "joined", "assistant_first": "after an empty one"},
    {"calls": "as text"},
    {"tools": "described"},
)
"""What else may help where a template does not show a conversation, tried one by one, then together."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How conversations of one shape are rendered. `left_out` are the parts that the template leaves out."""

    traits: TemplateTraits
    left_out: tuple[str, ...] = ()


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as `bos_token`, and their
    texts.

    `tools` and `reasoning` are the formats of the model's calls and reasoning. With the generic tool format,
    and where the template cannot show tools, the messages describe them. With `checked` false, what the
    template does not show is left out.

    The template is limited to `seconds` and `characters`, which are checked in every iteration of a loop and
    between any two pieces of output. Raises ModelLoadError if it is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        checked: bool = True,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
    ) -> None:
        self.source = source
        self.reasoning = reasoning
        self._format = tools or tool_format(GENERIC)
        self._checked = checked
        self._seconds = seconds
        self._program = Program(source, special_tokens, characters=characters)
        self._ways: dict[bytes, _Way] = {}
        described = tools is not None and tools.name == GENERIC
        self.traits = _traits(self._program, self._format, described=described)

    @property
    def unset_variables(self) -> list[str]:
        """The variables that nobody sets, unless a request does."""
        return self._program.unset

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
        left_out: list[str] | None = None,
    ) -> str:
        """The prompt for `messages`. With `continue_final_message` it ends within the last message's content.

        `kwargs` are more variables for the template, `tools` those that the model may call, `seconds` a
        shorter time limit than usual. The kinds of parts that the template leaves out are added to
        `left_out`: reasoning and names. Raises TemplateTooSlow, PromptTooLong as soon as there are more than
        `characters`, and RequestError naming the part that the template cannot show.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` needs `add_generation_prompt` to be false.",
                param="continue_final_message",
            )
        extra = dict(kwargs or {})
        for name in sorted(extra.keys() & (_RESERVED | self._program.special_tokens.keys())):
            raise RequestError(
                f"`{name}` cannot be set through `chat_template_kwargs`.",
                param=f"chat_template_kwargs.{name}",
            )
        chat = plain_messages(messages)
        rendering = _Rendering(self, tools, extra, add_generation_prompt, characters)
        with within(self._seconds if seconds is None else seconds):
            if not continue_final_message:
                return rendering.prompt(chat, left_out)
            thought = begun_reasoning(messages[-1], self.reasoning)
            if thought is not None and self.reasoning is not None:
                rendering.add_generation_prompt = True
                return _begun(rendering.prompt(chat[:-1], left_out), thought, self.reasoning)
            final = _mark_final(chat)
            return _cut(rendering.prompt(chat, left_out), final)

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[Chat, Tools | None]:
        """The messages and tools as the template gets them. Raises what `render` raises."""
        chat = plain_messages(messages)
        rendering = _Rendering(self, tools, kwargs or {}, add_generation_prompt, None)
        with within(self._seconds):
            traits = rendering.way(chat).traits
        return rewritten(chat, tools, traits, self._format)


@dataclass(slots=True)
class _Rendering:
    """One request's way through a template."""

    template: ChatTemplate
    tools: Sequence[dict[str, Any]] | None
    extra: Mapping[str, Any]
    add_generation_prompt: bool
    characters: int | None

    def prompt(self, chat: Chat, left_out: list[str] | None) -> str:
        """The prompt of a conversation with nothing lost. Raises RequestError if there is none."""
        way = self.way(chat)
        if left_out is not None:
            left_out.extend(way.left_out)
        first: Exception | None = None
        for traits in _tried(way.traits):
            prompt, failure = self._attempt(traits, chat)
            if prompt is not None:
                return prompt
            first = first or failure
        raise self._refused(chat, first)

    def way(self, chat: Chat) -> _Way:
        """How to render a conversation of this shape. Raises RequestError if parts of it would be lost."""
        ways = self.template._ways
        key = shape(chat, self.template.reasoning, bool(self.tools), self.add_generation_prompt, self.extra)
        way = ways.get(key)
        if way is None:
            way = self._find_way(marked(chat, self.template.reasoning))
            if len(ways) >= _MOST_SHAPES:
                ways.clear()
            ways[key] = way
        return way

    def _find_way(self, talk: Marked) -> _Way:
        """The first way in which a marked conversation is in the prompt, whole."""
        tools = MARKED_TOOLS if self.tools else None
        lost: list[str] = []
        failure: Exception | None = None
        for traits in _tried(self.template.traits):
            try:
                prompt = self._write(traits, talk.chat, tools, most=None)
            except (RequestError, OSError, MemoryError):  # the last two are the server's
                raise
            except Exception as error:  # a template is a program: it can fail in any way
                failure = failure if lost else failure or error
                continue
            missing = talk.lost(prompt)
            if tools is not None and tools[0]["function"]["name"] not in prompt:
                missing.append("tools[0]")
            if not missing:
                return _Way(traits, tuple(talk.left_out(prompt)))
            lost = lost if failure else lost or missing
        if not self.template._checked:
            return _Way(self.template.traits)
        if lost:
            raise RequestError(f"The chat template of this model does not show `{lost[0]}`.", param=lost[0])
        raise self._refused(talk.chat, failure)

    def _attempt(self, traits: TemplateTraits, chat: Chat) -> tuple[str | None, Exception | None]:
        """The prompt, or why there is none. Arguments that are malformed, and the names of tools, must be in
        it."""
        calls = [call["function"] for message in chat for call in message.get("tool_calls", ())]
        malformed = [call for call in calls if isinstance(call["arguments"], MalformedArguments)]
        failure: Exception | None = None
        for conversation in (chat, _as_single_arguments(chat)) if malformed else (chat,):
            try:
                prompt = self._write(traits, conversation, self.tools, self.characters)
            except (RequestError, PromptTooLong, OSError, MemoryError):  # the last two are the server's
                raise
            except Exception as error:  # a template is a program: unusual content can make it fail in any way
                failure = error
                continue
            names = [tool["function"]["name"] for tool in self.tools or ()]
            shown = conversation is not chat or all(call["arguments"] in prompt for call in malformed)
            if not self.template._checked or (shown and all(name in prompt for name in names)):
                return prompt, None
        return None, failure

    def _refused(self, chat: Chat, error: Exception | None) -> RequestError:
        """The error for a conversation that cannot be rendered, with the field because of which it cannot."""
        if not self.template._checked:
            return RequestError(f"The chat template refuses these messages: {error}", param="messages")
        if self.template.traits.user == "refused" and (unset := self.template.unset_variables):
            names = ", ".join(f"`{name}`" for name in unset)
            return RequestError(
                f"This model's chat template needs variables that the server does not set: {names}. "
                "`chat_template_kwargs` can set them.",
                param="chat_template_kwargs",
            )
        if self.extra and self._works(chat, replace(self, extra={})):
            return self._refusal("chat_template_kwargs", error)
        low, high = 0, len(chat) - 1  # the shortest conversation that fails ends with the message to name
        while low < high:
            middle = (low + high) // 2
            if self._works(chat[: middle + 1], self):
                low = middle + 1
            else:
                high = middle
        return self._refusal(f"messages[{low}]", error)

    @staticmethod
    def _works(chat: Chat, rendering: "_Rendering") -> bool:
        return rendering._attempt(rendering.template.traits, chat)[0] is not None

    @staticmethod
    def _refusal(field: str, error: Exception | None) -> RequestError:
        reason = f": {error}" if isinstance(error, Refusal) else "."
        return RequestError(f"The chat template of this model cannot show `{field}`{reason}", param=field)

    def _write(
        self, traits: TemplateTraits, chat: Chat, tools: Sequence[dict[str, Any]] | None, most: int | None
    ) -> str:
        messages, given = rewritten(chat, tools, traits, self.template._format)
        return self.template._program.write(
            most,
            messages=messages,
            tools=given,
            add_generation_prompt=self.add_generation_prompt,
            **self.extra,
        )


_known_traits: dict[bytes, TemplateTraits] = {}


def _traits(program: Program, format: ToolFormat, *, described: bool) -> TemplateTraits:
    """A program's traits, found once for each template and format."""
    key = blake2b(repr((program.source, program.special_tokens, format, described)).encode()).digest()
    if key not in _known_traits:
        if len(_known_traits) >= _MOST_TEMPLATES:
            _known_traits.clear()
        _known_traits[key] = find_traits(program, format, described=described)
    return _known_traits[key]


def _tried(traits: TemplateTraits) -> Iterator[TemplateTraits]:
    """The traits, then with one more change, then with more and more changes."""
    yield traits
    for change in _CHANGES:
        if (changed := replace(traits, **change)) != traits:
            yield changed
    together = traits
    for change in _CHANGES:
        together = replace(together, **change)
        yield together


def begun_reasoning(message: Message, format: ReasoningFormat | None) -> str | None:
    """The text of a message to be continued, if it begins with its reasoning; else None."""
    if format is None or not isinstance(message, AssistantMessage) or message.tool_calls:
        return None
    plain = plain_messages([message])[0]
    if message.content is None and (thought := plain.get("reasoning_content")):
        return f"{format.open}\n{thought}"
    return plain["content"] if format.begins(plain["content"]) else None


def _begun(prompt: str, thought: str, format: ReasoningFormat) -> str:
    """A prompt that ends with a text that begins with its reasoning. The generation prompt may have opened
    the reasoning already, or have opened and closed it."""
    end = prompt.rstrip()
    if end.endswith(format.open):
        return prompt + thought.lstrip().removeprefix(format.open).removeprefix("\n" * prompt.endswith("\n"))
    if end.endswith(format.close):
        prompt = prompt[: prompt.rfind(format.open)]
    return prompt + thought.lstrip()


def _mark_final(chat: Chat) -> str:
    final = chat[-1].get("content")
    if final is None:
        raise RequestError(
            "`continue_final_message` needs content in the last message.", param="continue_final_message"
        )
    chat[-1]["content"] = final + _MARK
    return str(final)


def _cut(prompt: str, final: str) -> str:
    """The prompt up to the end of the marked message; without trailing blanks if the template trims them."""
    at = prompt.rfind(_MARK.strip())
    if at < 0 or final.strip() not in prompt:
        raise RequestError(
            "`continue_final_message`: this model's chat template does not render the last message as it is.",
            param="continue_final_message",
        )
    return prompt[:at] if prompt.startswith(_MARK, at) else prompt[:at].rstrip()


def _as_single_arguments(chat: Chat) -> Chat:
    """The conversation with each malformed text of arguments as the value of one argument."""
    found: Chat = []
    for message in chat:
        if "tool_calls" in message:
            calls = [call | {"function": _single(call["function"])} for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        found.append(message)
    return found


def _single(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if not isinstance(arguments, MalformedArguments):
        return function
    return function | {"arguments": dict(arguments.items())}
