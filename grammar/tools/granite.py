"""Granite 3.

https://huggingface.co/ibm-granite/granite-3.1-8b-instruct
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="granite",
    signs=("<|tool_call|>", "<|start_of_role|>"),
    trigger="<|tool_call|>",
    open="<|tool_call|> [ ",
    before_name='{ "name" : "',
    after_name='" , "arguments" : ',
    after_arguments=" }",
    between=" , ",
    close=" ]",
)
