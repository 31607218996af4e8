"""DeepSeek R1, Qwen3, GLM-4.5 and most others.

https://huggingface.co/deepseek-ai/DeepSeek-R1
"""

from personae.grammar.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(name="think", signs=("</think>",), open="<think>", close="</think>")
