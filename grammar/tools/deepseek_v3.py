"""DeepSeek V3 and R1: arguments in a fenced block.

https://huggingface.co/deepseek-ai/DeepSeek-R1
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    trigger="<｜tool▁calls▁begin｜>",
    open="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name=" ```json ",
    after_arguments=" ```<｜tool▁call▁end｜>",
    close=" <｜tool▁calls▁end｜>",
)
