"""DeepSeek V3.1.

https://huggingface.co/deepseek-ai/DeepSeek-V3.1
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="deepseek_v31",
    signs=("<｜tool▁calls▁begin｜>",),
    trigger="<｜tool▁calls▁begin｜>",
    open="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    close=" <｜tool▁calls▁end｜>",
)
