"""Mixtures of experts: routing the tokens, the experts' products, and the weighted sum."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits choose experts; see `reference.route_scored`.

    `groups`, `kept`: the experts are in groups of equal size, of which a token uses some. `epsilon` is added
    to the sum that renormalizes, and `least` is the smallest that it may be.
    """

    top_k: int
    renormalize: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept: int = 1
    scale: float = 1.0
    epsilon: float = 0.0
    least: float = 0.0
