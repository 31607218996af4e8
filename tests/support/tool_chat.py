"""A chat template with tools and reasoning in Qwen3's format, tools for requests, and calls for answers."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif enable_thinking is defined %}<think>
{% endif %}{% endif %}"""


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    """A tool as requests list it. All its parameters are required."""
    function: dict[str, Any] = {
        "name": name,
        "description": f"Calls {name}.",
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }
    return {"type": "function", "function": function if strict is None else function | {"strict": strict}}


WEATHER = tool("get_weather", city={"type": "string"})
TIME = tool("get_time")


def call(name: str, /, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def write_tags(folder: Path) -> None:
    """Make the tags special tokens of a model folder. They replace its last tokens, for which the model has
    logits."""
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.get)[-len(TAGS) :]
    document["model"]["merges"] = [pair for pair in document["model"]["merges"] if "".join(pair) not in last]
    for name in last:
        del vocabulary[name]
    shorter = Tokenizer.from_str(json.dumps(document))
    shorter.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS])
    shorter.save(str(folder / "tokenizer.json"))
