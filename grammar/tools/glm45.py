"""GLM-4.5 and later.

https://huggingface.co/zai-org/GLM-4.5
"""

from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="glm45",
    signs=("<arg_key>", "<arg_value>"),
    trigger="<tool_call>",
    before_name="<tool_call>",
    after_name="",
    arguments=KeyedArguments(
        before_key=" <arg_key>", after_key="</arg_key> <arg_value>", after_value="</arg_value>", raw=True
    ),
    after_arguments=" </tool_call>",
)
