"""Mistral from tokenizer version 11 on: every call has a tag of its own, with its name outside of the JSON.

https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="mistral_v11",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
    before_name="[TOOL_CALLS]",
    after_name="[ARGS]",
    after_arguments="",
    between="",
    id="{random:.9}",
)
