"""Magistral and Ministral.

https://huggingface.co/mistralai/Magistral-Small-2509
"""

from personae.grammar.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(name="bracket_think", signs=("[/THINK]",), open="[THINK]", close="[/THINK]")
