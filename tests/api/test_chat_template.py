"""Chat templates: the same text that transformers makes of them."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from personae.api.templates.template import ChatTemplate
from personae.api.wire.conversation import Message
from personae.errors import ModelLoadError, RequestError

SHARED = "shared/data/tokenizers"  # beside the repository or above it
TEMPLATES = [
    path
    for parent in Path(__file__).parents
    for path in sorted((parent / SHARED).glob("chat_templates*/*.jinja"))
]
NEEDS_VARIABLES = "firefunction"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

OWN = {
    "chatml": (
        "{%- for message in messages %}\n  {{- '<|im_start|>' + message.role + '\\n' + message.content }}\n"
        "  {{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "calls": (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% if m.content %}{{ m.content }}{% endif %}"
        "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.id }}:{{ call | tojson }}"
        "{{ call.function.arguments | tojson(indent=2) }}{% endfor %}{% endif %}{% endfor %}{{ eos_token }}"
    ),
    "blocks": (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content | trim }}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "names": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ m.name }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}{{ mood }}",
}

TALKS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": 'What is <b>"2 + 2"</b>? Grüße 🎭'}],
    "long": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "again"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"city": "Zürich", "days": [1, 2]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ],
    "reasoned": [
        {"role": "user", "content": "hm", "name": "ada"},
        {"role": "assistant", "content": "so", "reasoning_content": "because"},
        {"role": "user", "content": "ok"},
    ],
}


def wire(talk: list[dict[str, Any]]) -> list[Message]:
    """The messages as a client sends them: arguments as JSON text."""
    sent = msgspec.json.decode(msgspec.json.encode(talk))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = msgspec.json.encode(call["function"]["arguments"]).decode()
    return msgspec.convert(sent, list[Message])


@cache
def compiled(source: str, checked: bool) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, checked=checked)


def both(
    source: str, talk: list[dict[str, Any]], *, checked: bool = False, **kwargs: Any
) -> tuple[str | None, str | None]:
    """What transformers and the server make of the messages to which the server rewrites a conversation; None
    where it is refused."""
    options = {
        name: kwargs.pop(name)
        for name in ("add_generation_prompt", "continue_final_message")
        if name in kwargs
    }
    template = compiled(source, checked)
    try:
        ours = template.render(wire(talk), **options, kwargs=kwargs)
    except RequestError:
        return None, None
    rewritten, tools = template.conversation(
        wire(talk), add_generation_prompt=options["add_generation_prompt"], kwargs=kwargs
    )
    [truth], _ = render_jinja_template(
        [rewritten], tools=tools, chat_template=source, **SPECIAL, **options, **kwargs
    )
    return str(truth), ours


MISSING = pytest.param("none", marks=pytest.mark.skip(reason=f"there is no {SHARED} beside this repository"))
shared_templates = pytest.mark.parametrize(
    "path", TEMPLATES or [MISSING], ids=lambda path: getattr(path, "name", "none")
)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("generation", [True, False])
def test_our_own_templates_render_as_in_transformers(name: str, talk: str, generation: bool) -> None:
    truth, ours = both(OWN[name], TALKS[talk], add_generation_prompt=generation, mood="good")
    assert ours == truth
    assert truth is not None or talk == "tools"


@shared_templates
def test_models_templates_render_as_in_transformers(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    for talk in TALKS.values():
        for kwargs in ({}, {"enable_thinking": False}, {"documents_unknown": [1]}):
            truth, ours = both(source, talk, checked=True, add_generation_prompt=True, **kwargs)
            assert ours == truth
            assert ours is not None or NEEDS_VARIABLES in path.name
        truth, ours = both(source, talk, checked=True, add_generation_prompt=False)
        assert ours == truth


@shared_templates
@pytest.mark.parametrize("final", ["The answer is", "The answer is  \n"])
def test_a_continued_message_ends_as_in_transformers(path: Path, final: str) -> None:
    source = path.read_text(encoding="utf-8")
    talk = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": final}]
    truth, ours = both(source, talk, continue_final_message=True, add_generation_prompt=False)
    assert ours == truth


def test_a_continued_message_ends_the_prompt() -> None:
    talk = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "Well, "}]
    truth, ours = both(OWN["chatml"], talk, continue_final_message=True, add_generation_prompt=False)
    assert ours == truth
    assert ours is not None
    assert ours.endswith("assistant\nWell, ")


def render(source: str, messages: Any, *, checked: bool = False, **kwargs: Any) -> str:
    return ChatTemplate(source, SPECIAL, checked=checked).render(
        msgspec.convert(messages, list[Message]), **kwargs
    )


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_null_fields_are_absent_for_the_template() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "audio": None}
    assert render("{{ messages[0].keys() | list }}", [message]) == "['role', 'content']"


def test_a_developer_is_a_system_to_templates_that_know_none() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


@pytest.mark.parametrize("checked", [True, False])
def test_a_template_that_refuses_says_why(checked: bool) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render(source, [{"role": "user", "content": "x"}], checked=checked)
    assert caught.value.param == ("messages[0]" if checked else "messages")


@pytest.mark.parametrize("checked", [True, False])
def test_a_template_that_fails_is_a_refusal(checked: bool) -> None:
    with pytest.raises(RequestError):
        render("{{ 1 // 0 }}", [{"role": "user", "content": "x"}], checked=checked)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ (strftime_now | attr('__globals__'))['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source, [{"role": "user", "content": "x"}])


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja"):
        ChatTemplate("{% if %}", SPECIAL)


def test_a_client_that_writes_jinja_gets_its_text_back() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"


def test_a_requests_own_template_may_leave_out_what_it_likes() -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    source = "{{ messages[0].content }}"
    assert render(source, talk) == "x"
    with pytest.raises(RequestError) as caught:
        render(source, talk, checked=True)
    assert caught.value.param == "messages[1].content"
    once = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    system = {"role": "system", "content": "s"}
    assert render(once, [system, talk[0], talk[1], system | {"content": "t"}, talk[0]]) == "s\n\nt;x;y;x;"
