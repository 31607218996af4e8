"""An EAGLE-3 head (https://arxiv.org/abs/2503.01840): one decoder layer that guesses from hidden states.

For each token the model that is served leaves its residual stream of three layers, low, middle and high. With
f these three side by side, and e the embedding of the token after it:

    h = W_fc f
    a = h + attention([norm_e(e), norm_h(h)])
    r = a + mlp(norm_a(a))
    logits = W_head norm(r)                over the head's own vocabulary, a part of the model's

The logits are those of the token after e. To guess further, r takes the place of h, and the embedding of the
guessed token that of e.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.heads.config import HeadConfig
from personae.engine.kv import KVCache
from personae.engine.layers.attention import Attention
from personae.engine.layers.block import BlockContext, KVSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import MLP
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.rotary import RopeConfig, rotary_tables
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import OUTPUT, Scheme
from personae.kernels.attention import AttentionBatch, AttentionShape, attention_backend
from personae.kernels.decoder import Weight

LAYER, EMBEDDING = "midlayer", "embed_tokens.weight"


class Eagle3Head:
    """A head for the model with this `embedding` [vocab_size, hidden_size], which it shares, and `layers`
    layers. With `own_embedding` it has one of its own. Its parameters are allocated here and filled by
    `heads/loader.py`.

    `ids`: [draft_vocab_size] int64, the model's token for each token of the head.
    """

    def __init__(
        self,
        config: HeadConfig,
        embedding: Tensor,
        layers: int,
        *,
        dtype: torch.dtype,
        max_position: int,
        scheme: Scheme,
        own_embedding: bool = False,
    ) -> None:
        device = embedding.device
        self.config, self.dtype, self.device = config, dtype, device
        self.layers = config.layers_of(layers)
        self.max_position = min(config.max_position, max_position)
        hidden = config.hidden_size

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.eps, dtype=dtype, device=device)

        def rope(kind: RopeConfig, head_dim: int) -> tuple[Tensor, Tensor]:
            return rotary_tables(kind, head_dim, self.max_position, device)

        context = BlockContext(0, LAYER, hidden, dtype, device, scheme, norm, rope)
        self.own_embedding = own_embedding
        self.embedding = (
            torch.empty(config.vocab_size, hidden, dtype=dtype, device=device) if own_embedding else embedding
        )
        self.fc = context.linear(
            ("fc",), len(self.layers) * config.target_hidden_size, (hidden,), bias=config.fc_bias
        )
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (norm(hidden) for _ in range(4))
        self.attention, self.mlp = Attention(config.attention, context), MLP(config.mlp, context)
        self.output = context.linear((OUTPUT,), hidden, (config.draft_vocab_size,), bias=False)
        self.ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=device)
        self._attention = attention_backend(device, dtype)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What it keeps of every token, in addition to `hidden_size` numbers."""
        return (self.config.attention.kv,)

    def combine(self, states: Tensor) -> Tensor:
        """The residual stream of its layers [T, layers, target_hidden_size] -> h [T, hidden_size]."""
        return self.fc(states.to(self.dtype).flatten(1))

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """One pass over T pairs of a hidden state and the token after it.

        tokens, positions: [T] int64, the token after each hidden state and the hidden state's position.
        hidden: [T, hidden_size], of `combine` or of an earlier pass. Returns r: [T, hidden_size].
        """
        shape = AttentionShape(
            self.attention.heads,
            self.attention.kv.heads,
            self.attention.kv.head_dim,
            kv.page_size,
            self.dtype,
            kv.dtype,
        )
        step = ForwardContext(positions, batch, kv.layers, {0: self._attention.plan(batch, shape)}, None)
        normed = self.hidden_norm(hidden)
        pairs = torch.cat((self.input_norm(F.embedding(tokens, self.embedding)), normed), -1)
        residual = normed if self.config.norm_before_residual else hidden
        normed, residual = self.mlp_norm.add(self.attention(pairs, step), residual)
        return residual + self.mlp(normed, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> [S, draft_vocab_size]."""
        return self.output(self.norm(hidden))

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest token of the model's vocabulary for rows of `forward`'s result: [S] int64."""
        return self.ids[self.logits(hidden).argmax(-1)]

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill), with the names of the flat format."""
        if self.own_embedding:
            yield EMBEDDING, self.embedding
        yield from self.fc.tensors()
        yield f"{LAYER}.input_layernorm.weight", self.input_norm.weight
        yield f"{LAYER}.hidden_norm.weight", self.hidden_norm.weight
        yield from self.attention.tensors()
        yield f"{LAYER}.post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.tensors()
        yield "norm.weight", self.norm.weight
        yield from self.output.tensors()

    def pack(self) -> None:
        """Packs the weights for this machine. Call it once, after all tensors are filled."""
        for norm in (self.input_norm, self.hidden_norm, self.mlp_norm, self.norm):
            norm.finish()
        for linear in self._linears():
            linear.method.loaded()
            linear.pack()

    def _linears(self) -> Iterator[Linear]:
        yield self.fc
        yield from self.attention.linears()
        yield from self.mlp.linears()
        yield self.output
