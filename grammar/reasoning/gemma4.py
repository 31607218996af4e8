"""Gemma 4.

https://ai.google.dev/gemma/docs/capabilities/thinking
"""

from personae.grammar.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(
    name="gemma4", signs=("<|channel>thought",), open="<|channel>thought", close="<channel|>"
)
