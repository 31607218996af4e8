"""Random cases by kind."""

from collections.abc import Callable

from ptx import cases
from ptx.cases import Case
from ptx.cases_attention import attention
from ptx.cases_lora import lora
from ptx.cases_sampling import sampling

Maker = Callable[[int, int], Case]
KINDS: dict[str, Maker] = {
    "attention": attention,
    "lora": lora,
    "sampling": lambda seed, _: sampling(seed),
    "norms": lambda seed, _: cases.norms(seed),
    "rotary": lambda seed, _: cases.rotary(seed),
    "gates": lambda seed, _: cases.gates(seed),
    "append": cases.append,
    "experts": lambda seed, _: cases.experts(seed),
    "quantized": lambda seed, _: cases.quantized(seed),
}


def case(kind: str, seed: int, capability: int) -> Case:
    """The seed's case of a kind."""
    return KINDS[kind](seed, capability)
