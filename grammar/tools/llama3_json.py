"""Llama 3.1 to 3.3.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="llama3_json",
    signs=("ipython", '"parameters": '),
    trigger="{",
    before_name='{ "name" : "',
    after_name='" , "parameters" : ',
    after_arguments=" }",
    between=" ; ",
    anywhere=False,
)
