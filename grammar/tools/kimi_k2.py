"""Kimi K2. Its template writes the ids of earlier calls as the model wrote them.

https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="kimi_k2",
    signs=("<|tool_calls_section_begin|>",),
    trigger="<|tool_calls_section_begin|>",
    open="<|tool_calls_section_begin|> ",
    before_name="<|tool_call_begin|> functions.",
    after_name=":# <|tool_call_argument_begin|> ",
    after_arguments=" <|tool_call_end|>",
    close=" <|tool_calls_section_end|>",
    id="functions.{name}:{number}",
)
