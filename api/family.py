"""How a model chats: its templates, and the formats in which it writes tool calls and reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from personae.api.templates.template import ChatTemplate
from personae.api.wire.conversation import AssistantMessage, FunctionMessage, Message, ToolMessage
from personae.engine.tokens import Tokenizer
from personae.errors import ModelLoadError, RequestError
from personae.grammar.reasoning.format import ReasoningFormat
from personae.grammar.reasoning.registry import find_reasoning_format, reasoning_format
from personae.grammar.response_template import imported_reasoning, imported_tools
from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.registry import GENERIC, find_tool_format, tool_format

_NONE = "none"
_LONGEST_TEMPLATE, _MOST_REQUESTED = 2**16, 16


@dataclass(frozen=True, slots=True)
class Family:
    """`template` is None if the model has none. `tool_template` is a separate one for tools, if the model has
    it.

    `special` maps the names of special tokens to ids. `special_tokens` maps the templates' names for them to
    their texts. `requested` has the templates of requests, compiled once because requests probably repeat
    them; `variants` the families of adapters that chat in another way.
    """

    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    requested: dict[str, ChatTemplate] = field(default_factory=dict, repr=False, compare=False)
    variants: "dict[tuple[str | None, ...], Family]" = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str | None = None, reasoning: str | None = None) -> "Family":
        """The family of a tokenizer's model. `tools` and `reasoning` name formats, "none" for none. Without a
        name the format is detected from the chat templates, or derived from the response template. If there
        is none and the templates do not show tools, it is the generic format.

        Raises ModelLoadError for an unknown name, or a template that is not valid Jinja.
        """
        sources = tokenizer.chat_templates
        text = "\n".join(sources.values())
        answers = tokenizer.response_template
        thoughts = _chosen(
            reasoning, reasoning_format, find_reasoning_format(text) or imported_reasoning(answers)
        )
        found = find_tool_format(text) or imported_tools(answers)
        templates, found = cls.compiled(
            sources,
            tokenizer.special_tokens,
            _chosen(tools, tool_format, found),
            thoughts,
            fixed=tools is not None,
        )
        return cls(
            templates.get("default"),
            templates.get("tool_use"),
            found,
            thoughts,
            {tokenizer.token_bytes(id).decode(): id for id in tokenizer.special_ids},
            tokenizer.special_tokens,
        )

    @staticmethod
    def compiled(
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        fixed: bool = False,
    ) -> tuple[dict[str, ChatTemplate], ToolFormat | None]:
        """A model's templates by name, and the format of its calls. Without a format, and if no template
        shows tools, that is the generic one, unless it is `fixed`."""
        templates = {
            name: ChatTemplate(source, special_tokens, tools=tools, reasoning=reasoning)
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }
        described = all(template.traits.tools == "described" for template in templates.values())
        if tools is None and not fixed and templates and described:
            return Family.compiled(sources, special_tokens, tool_format(GENERIC), reasoning)
        return templates, tools

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        seconds: float | None = None,
        characters: int | None = None,
        left_out: list[str] | None = None,
    ) -> str:
        """The prompt. A generation prompt is added unless the request says no or continues a message.

        `seconds` and `characters` limit the template further. What the template leaves out is added to
        `left_out`. Raises TemplateTooSlow and PromptTooLong, and RequestError if there is no template, or
        naming what it cannot show.
        """
        template = self.template
        if self.tool_template is not None and (tools or template is None or _has_calls(messages)):
            template = self.tool_template
        if template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions with a prompt of your own.",
                param="messages",
            )
        continues = bool(continue_final_message)
        return template.render(
            messages,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            kwargs=kwargs,
            tools=tools,
            seconds=seconds,
            characters=characters,
            left_out=left_out,
        )

    def with_template(self, source: str) -> "Family":
        """The same family with another chat template, from a request. Raises RequestError."""
        if len(source) > _LONGEST_TEMPLATE:
            raise RequestError(
                f"`chat_template` may have at most {_LONGEST_TEMPLATE} characters.", param="chat_template"
            )
        template = self.requested.get(source)
        if template is None:
            template = self._compiled_request(source)
            if len(self.requested) >= _MOST_REQUESTED:
                self.requested.clear()
            self.requested[source] = template
        return replace(self, template=template, tool_template=None)

    def _compiled_request(self, source: str) -> ChatTemplate:
        """A template from a request. It shows tools by itself, if it can."""
        tools = None if self.tools is not None and self.tools.name == GENERIC else self.tools
        try:
            return ChatTemplate(
                source, self.special_tokens, tools=tools, reasoning=self.reasoning, checked=False
            )
        except ModelLoadError as error:
            message = error.message.replace("The model's chat template", "`chat_template`")
            raise RequestError(message, param="chat_template") from None
        except (RecursionError, SyntaxError, MemoryError) as error:
            message = "`chat_template` is nested too deeply."
            raise RequestError(message, param="chat_template") from error

    def thinking(self, asked: bool | None) -> dict[str, Any]:
        """The template's variables for `enable_thinking`. Raises RequestError if the template cannot follow
        it."""
        if asked is None:
            return {}
        if self.template is not None and "enable_thinking" in self.template.source:
            return {"enable_thinking": asked}
        if asked == (self.reasoning is not None):
            return {}  # this holds anyway
        raise RequestError(
            "`enable_thinking`: this model's chat template has no way to "
            + ("turn reasoning on." if asked else "turn reasoning off."),
            param="enable_thinking",
            code="unsupported_parameter",
        )

    def effort(self, asked: str | None) -> dict[str, Any]:
        """The template's variables for a `reasoning_effort`. Raises RequestError if the template has none."""
        if asked is None:
            return {}
        if self.template is not None and "reasoning_effort" in self.template.source:
            return {"reasoning_effort": asked}
        if self.template is not None and "enable_thinking" in self.template.source:
            return {"enable_thinking": asked != "none"}
        raise RequestError(
            "`reasoning_effort`: this model's chat template has no way to say how much to reason.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )


def _has_calls(messages: Sequence[Message]) -> bool:
    """Whether a conversation has calls or results."""
    return any(
        isinstance(message, ToolMessage | FunctionMessage)
        or (isinstance(message, AssistantMessage) and (message.tool_calls or message.function_call))
        for message in messages
    )


def check_formats(tools: str | None, reasoning: str | None) -> None:
    """Raises ModelLoadError for an unknown name, as Family.of does, before the model loads."""
    _chosen(tools, tool_format, None)
    _chosen(reasoning, reasoning_format, None)


def _chosen(name: str | None, format_of: Any, found: Any) -> Any:
    if name is None:
        return found
    return None if name == _NONE else format_of(name)
