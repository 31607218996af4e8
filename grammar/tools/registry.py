"""The tool formats by name, and the detection of a chat template's format."""

from importlib import import_module

from personae.errors import ModelLoadError
from personae.grammar.tools.format import ToolFormat

# Formats with less specific signs come later.
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
"""The format for models whose chat template cannot show tools."""


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ModelLoadError if it does not exist."""
    known = (*NAMES, GENERIC)
    if name not in known:
        raise ModelLoadError(f"There is no tool format {name!r}. The formats are {', '.join(known)}.")
    format: ToolFormat = import_module(f"personae.grammar.tools.{name}").FORMAT
    return format


def find_tool_format(template: str) -> ToolFormat | None:
    """The format in which the model of a chat template writes tool calls. None if it writes none, or the
    format is unknown."""
    for name in NAMES:
        format = tool_format(name)
        if all(sign in template for sign in format.signs):
            return format
    return None
