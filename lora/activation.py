"""Activated LoRA (aLoRA, https://arxiv.org/abs/2504.12397).

Such an adapter is active only from the last occurrence of its invocation tokens in the prompt on. The tokens
before that are computed by the base, and so is their KV.
"""

from collections.abc import Sequence


def activation_start(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Where the last occurrence of the invocation begins; None if there is none. Then the base computes
    everything."""
    wanted, length = list(invocation), len(invocation)
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == wanted[0] and list(prompt[start : start + length]) == wanted:
            return start
    return None
