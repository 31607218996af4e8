"""What all heads have in common: they read states of the served model, and guess with one layer of their own.

For each token the model leaves its residual stream of some of its layers. `combine` makes one hidden state of
these. A forward pass takes pairs of a hidden state and the token after it, and its result says which token
comes after that one. To guess further, the result takes the place of the hidden state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.layers.block import Block, BlockContext, KVSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm, RMSNorm
from personae.engine.layers.rotary import RopeConfig, rotary_tables
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import Scheme
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import attention_backend
from personae.kernels.decoder import Weight


class Head(ABC):
    """A trained head. Its parameters are allocated by its class and filled by `heads/loader.py`.

    `layers`: it reads the residual stream as it enters these layers of the model; the number of layers means
    as it leaves the last. `attention`: the one block that keeps something of every token.
    """

    attention: Block

    def __init__(
        self,
        prefix: str,
        hidden_size: int,
        vocab_size: int,
        eps: float,
        *,
        layers: tuple[int, ...],
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme,
    ) -> None:
        """`prefix`: of its layer's names in the checkpoint. `vocab_size`: the model's. `max_position`: the
        longest sequence for which it can guess."""
        self.hidden_size, self.vocab_size, self.layers = hidden_size, vocab_size, layers
        self.max_position, self.dtype, self.device = max_position, dtype, device

        def norm(size: int) -> Norm:
            return RMSNorm(size, eps, dtype=dtype, device=device)

        def rope(kind: RopeConfig, head_dim: int) -> tuple[Tensor, Tensor]:
            return rotary_tables(kind, head_dim, max_position, device)

        self._context = BlockContext(0, (0, 1), prefix, hidden_size, dtype, device, scheme, norm, rope)
        self._backend = attention_backend(device, dtype)

    @property
    def kv_specs(self) -> tuple[KVSpec | None, ...]:
        """What it keeps of every token, in addition to `hidden_size` numbers."""
        return (self.attention.kv,)

    @abstractmethod
    def combine(self, states: Tensor) -> Tensor:
        """The residual stream of its layers [T, layers, the model's hidden size] -> h [T, hidden_size]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """One pass over T pairs of a hidden state and the token after it.

        tokens, positions: [T] int64, the token after each hidden state and the hidden state's position.
        hidden: [T, hidden_size], of `combine` or of an earlier pass. Returns [T, hidden_size].
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> [S, tokens that it can guess]."""

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest token of the model's vocabulary for rows of `forward`'s result: [S] int64."""
        return self.logits(hidden).argmax(-1)

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill)."""

    @abstractmethod
    def norms(self) -> Iterator[Norm]:
        """All its norms."""

    @abstractmethod
    def linears(self) -> Iterator[Linear]:
        """Its own linear modules. Each is packed separately."""

    def pack(self) -> None:
        """Packs the weights for this machine. Call it once, after all tensors are filled."""
        for norm in self.norms():
            norm.finish()
        for linear in self.linears():
            linear.method.loaded()
            linear.pack()

    def _step(self, positions: Tensor, kv: KVCache, batch: AttentionBatch) -> ForwardContext:
        """What its blocks need to know of a pass."""
        kept = self.attention.kv
        assert kept is not None
        shape = AttentionShape(
            self.attention.heads, kept.heads, kept.head_dim, kv.page_size, self.dtype, kv.dtype
        )
        return ForwardContext(
            positions, batch, kv.layers, kv.states, {0: self._backend.plan(batch, shape)}, None
        )
