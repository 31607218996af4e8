"""The tool formats by name, and which of them a chat template is written for."""

from importlib import import_module

from personae.errors import ModelLoadError
from personae.grammar.tools.format import ToolFormat

# Those with plainer signs come later.
NAMES = (
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "kimi_k2",
    "gemma4",
    "function_gemma",
    "harmony",
    "olmo3",
    "lfm2",
    "phi4",
    "hermes",
    "mistral_v11",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "pythonic",
    "llama3_json",
)
GENERIC = "generic"
"""The format for models whose chat template knows no tools."""


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ModelLoadError when there is none."""
    known = (*NAMES, GENERIC)
    if name not in known:
        raise ModelLoadError(f"There is no tool format {name!r}; there are {', '.join(known)}.")
    format: ToolFormat = import_module(f"personae.grammar.tools.{name}").FORMAT
    return format


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template's model writes tool calls in, if it does and the format is known."""
    for name in NAMES:
        format = tool_format(name)
        if all(sign in template for sign in format.signs):
            return format
    return None
