"""Hermes, Qwen2.5 and Qwen3.

https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B,
https://qwen.readthedocs.io/en/latest/framework/function_call.html
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="hermes",
    signs=("<tool_call>", '"arguments'),
    trigger="<tool_call>",
    before_name='<tool_call> { "name" : "',
    after_name='" , "arguments" : ',
    after_arguments=" } </tool_call>",
)
