"""Activated LoRA (aLoRA, https://arxiv.org/abs/2504.12397): an adapter that is active only from the last
occurrence of its invocation tokens in the prompt on. What comes before is the base's, and so is its KV."""

from collections.abc import Sequence


def activation_start(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Where the last occurrence of the invocation begins; None if there is none: then all is the base's."""
    wanted, length = list(invocation), len(invocation)
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == wanted[0] and list(prompt[start : start + length]) == wanted:
            return start
    return None
