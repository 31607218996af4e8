"""What every layer needs to know about its step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.kernels.attention import AttentionBatch
from personae.kernels.attention_backend import AttentionPlan
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.states import StatePlan
from personae.lora.context import LoraContext


@dataclass(frozen=True, slots=True)
class StepPart:
    """Some of a step's packed tokens, which are computed at a time. `batch` and `lora` are those of the
    part alone. A row may begin in one part and go on in the next."""

    tokens: slice
    batch: AttentionBatch
    lora: LoraContext | None

    def of(self, x: Tensor) -> Tensor:
        """The part's entries of x [T], in memory of their own: kernels are compiled for addresses at which
        tensors begin."""
        return x[self.tokens].clone()


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's tokens of a step, where each rank has sequences of its own. `counts`: how many each rank has,
    in packed order. `part`: this rank's; None if it has none."""

    counts: list[int]
    part: StepPart | None


@dataclass(frozen=True, slots=True)
class StepHalf:
    """Half of each rank's tokens of a step, where each rank has sequences of its own. `tokens`: [n] int64,
    where they are in the step. `lora`: of all of them."""

    tokens: Tensor
    lora: LoraContext | None
    share: RankShare


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass over T packed tokens."""

    positions: Tensor
    """[T] int64: each token's position in its own sequence."""
    batch: AttentionBatch
    caches: Mapping[int, tuple[Tensor, Tensor]]
    """The keys and values of each layer."""
    states: Mapping[int, Tensor]
    """The states of each layer that has some."""
    attend: Mapping[int, AttentionPlan]
    """Attention over `batch`, as planned for this step, of each layer."""
    lora: LoraContext | None
    state_plan: StatePlan | None = None
    """Of the layers with states; None if there are none."""
    latent_plan: LatentPlan | None = None
    """Of the layers with latent attention; None if there are none."""
    per_layer: Tensor | None = None
    """[T, layers, size]: each token's embedding for each layer, if the model has such."""
    whole: "ForwardContext | None" = None
    """Of all ranks' tokens, if each rank has sequences of its own: for blocks that ranks share, which read
    positions and adapters only."""

    def linear(self, module: Linear, layer: int, group: str, x: Tensor) -> Tensor:
        """module(x) and the adapters' updates: [T, inputs] -> [T, sum of outputs]."""
        if self.lora is None:
            return module(x)
        finish = self.lora.begin(layer, group, x)
        y = module(x)
        finish(torch.split(y, module.outputs, dim=-1))
        return y
