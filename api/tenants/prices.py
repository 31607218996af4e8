"""What tokens cost: prices of a million tokens by the model that answers, as the operator set them."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_FORM = re.compile(r"(?P<name>\*|[^=\s]{1,200})=(?P<numbers>[0-9.]+(?:/[0-9.]+){1,2})")
_MILLION = 1_000_000
_MOST = 1e9
ANY = "*"


class Price(NamedTuple):
    """The price of a million tokens of prompts, of answers, and of prompts that were in the prefix cache."""

    prompt: float
    completion: float
    cached: float


def parse_price(text: str) -> tuple[str, Price]:
    """A model's name, or `*`, and its price: `poet=0.5/1.5`, or `poet=0.5/1.5/0.1` with that of cached
    tokens. Raises ValueError."""
    match = _FORM.fullmatch(text)
    try:
        numbers = [float(number) for number in match["numbers"].split("/")] if match else []
    except ValueError:
        numbers = []
    if match is None or not numbers or any(not math.isfinite(n) or n > _MOST for n in numbers):
        raise ValueError(
            f"'{text}' is no price; write NAME=PROMPT/ANSWER for a million tokens, as poet=0.5/1.5."
        )
    prompt, completion, *cached = numbers
    return match["name"], Price(prompt, completion, cached[0] if cached else prompt)


def check_prices(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The values of `--price`. Raises ValueError."""
    names = [parse_price(text)[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} has two prices.")
    return texts


class Prices:
    """The prices of all models. What has none costs what `*` does, else nothing."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._prices = dict(map(parse_price, texts))

    def cost(self, model: str, prompt: int, cached: int, completion: int) -> float:
        """What a request costs: `cached` of the `prompt` tokens were in the prefix cache."""
        price = self._prices.get(model) or self._prices.get(ANY)
        if price is None:
            return 0.0
        tokens = (prompt - cached) * price.prompt + cached * price.cached + completion * price.completion
        return tokens / _MILLION
