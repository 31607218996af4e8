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
from torch import Tensor

from personae.engine.heads.eagle3_config import Eagle3Config
from personae.engine.heads.head import Head
from personae.engine.kv import KVCache
from personae.engine.layers.embedding import TokenEmbedding
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.quantization import scheme_of
from personae.engine.quantization.base import OUTPUT, Scheme
from personae.kernels.attention import AttentionBatch
from personae.kernels.decoder import Weight

LAYER, EMBEDDING = "midlayer", "embed_tokens.weight"


class Eagle3Head(Head):
    """See Head. It shares the `embedding` [vocab_size, hidden_size] of the model, which has `layers` layers.
    With `own_embedding` it has one of its own.

    `ids`: [draft_vocab_size] int64, the model's token for each token of the head.
    """

    def __init__(
        self,
        config: Eagle3Config,
        embedding: TokenEmbedding,
        layers: int,
        *,
        dtype: torch.dtype,
        max_position: int,
        scheme: Scheme,
        own_embedding: bool = False,
    ) -> None:
        hidden, device = config.hidden_size, embedding.device
        super().__init__(
            LAYER,
            hidden,
            config.vocab_size,
            config.eps,
            layers=config.layers_of(layers),
            max_position=min(config.max_position, max_position),
            dtype=dtype,
            device=device,
            scheme=scheme,
        )
        context = self._context
        self.own_embedding = own_embedding
        if own_embedding:
            size = config.vocab_size, hidden
            embedding = TokenEmbedding((), *size, scheme=scheme_of(None), dtype=dtype, device=device)
        self.embedding = embedding
        self.norm_before_residual = config.norm_before_residual
        self.fc = context.linear(
            ("fc",), len(self.layers) * config.target_hidden_size, (hidden,), bias=config.fc_bias
        )
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (context.norm(hidden) for _ in range(4))
        self.attention, self.mlp = config.attention.build(context), config.mlp.build(context)
        self.output = context.linear((OUTPUT,), hidden, (config.draft_vocab_size,), bias=False)
        self.ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=device)

    def combine(self, states: Tensor) -> Tensor:
        """See Head."""
        return self.fc(states.to(self.dtype).flatten(1))

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """See Head: the result is r."""
        step = self._step(positions, kv, batch)
        normed = self.hidden_norm(hidden)
        pairs = torch.cat((self.input_norm(self.embedding(tokens)), normed), -1)
        residual = normed if self.norm_before_residual else hidden
        normed, residual = self.mlp_norm.add(self.attention(pairs, step), residual)
        return residual + self.mlp(normed, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Head: [S, hidden_size] -> [S, draft_vocab_size]."""
        return self.output(self.norm(hidden))

    def choose(self, hidden: Tensor) -> Tensor:
        """See Head."""
        return self.ids[super().choose(hidden)]

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Head: with the names of the flat format."""
        if self.own_embedding:
            yield EMBEDDING, self.embedding.weight
        yield from self.fc.tensors()
        yield f"{LAYER}.input_layernorm.weight", self.input_norm.weight
        yield f"{LAYER}.hidden_norm.weight", self.hidden_norm.weight
        yield from self.attention.tensors()
        yield f"{LAYER}.post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.tensors()
        yield "norm.weight", self.norm.weight
        yield from self.output.tensors()

    def norms(self) -> Iterator[Norm]:
        """See Head."""
        yield from (self.input_norm, self.hidden_norm, self.mlp_norm, self.norm)

    def linears(self) -> Iterator[Linear]:
        """See Head."""
        yield self.fc
        yield from self.attention.linears()
        yield from self.mlp.linears()
        yield self.output
