"""Mistral up to tokenizer version 7: one list of calls.

https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    trigger="[TOOL_CALLS]",
    open="[TOOL_CALLS] [ ",
    before_name='{ "name" : "',
    after_name='" , "arguments" : ',
    after_arguments=" }",
    between=" , ",
    close=" ]",
    id="{random:.9}",
)
