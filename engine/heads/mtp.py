"""The layer of an MTP checkpoint (multi-token prediction) that guesses the token after the next one.

It was trained with the model, whose embedding and output matrix it shares. With h the model's hidden state of
a token, after the final norm, and e the embedding of the token after it:

    x = W_in [norm_h(h), norm_e(e)]
    r = norm(layer(x))                     a decoder layer as the model's own
    logits = W_out r

The logits are those of the token after e. To guess further, r takes the place of h, and the embedding of the
guessed token that of e: so one layer guesses any number of tokens, although it was trained for one.

Names and equations are those of MiMo's makers. vLLM and SGLang replace e by zeros at the first
position. The makers' own code does not.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from personae.engine.checkpoints.huggingface import MTP
from personae.engine.config import ModelConfig
from personae.engine.heads.head import Head
from personae.engine.kv import KVCache
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.models.decoder import Decoder
from personae.engine.models.layer import Layer
from personae.engine.quantization.base import Scheme
from personae.kernels.attention import AttentionBatch
from personae.kernels.decoder import Weight

LAYER = f"{MTP}0"


class MtpHead(Head):
    """See Head. `config`: of the checkpoint that has the layer, which guesses for `model`."""

    def __init__(self, config: ModelConfig, model: Decoder, *, max_position: int, scheme: Scheme) -> None:
        hidden = config.hidden_size
        super().__init__(
            LAYER,
            hidden,
            config.vocab_size,
            config.eps,
            layers=(model.config.layers,),
            max_position=min(config.max_position, max_position),
            dtype=model.dtype,
            device=model.device,
            scheme=scheme,
        )
        self._model = model
        self.hidden_norm, self.token_norm, self.norm = (self._context.norm(hidden) for _ in range(3))
        self.input = self._context.linear((f"{LAYER}.input_proj",), 2 * hidden, (hidden,), bias=False)
        self.layer = Layer(config, config.layer_specs[0], self._context)
        self.attention = self.layer.attention

    def combine(self, states: Tensor) -> Tensor:
        """See Head."""
        return self._model.norm(states[:, 0].to(self.dtype))

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """See Head: the result is r."""
        step = self._step(positions, kv, batch)
        embedded = self._model.embedding(tokens)
        pairs = torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), -1)
        x, residual = self.layer(self.input(pairs), None, step)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See Head: [S, hidden_size] -> [S, vocab_size]."""
        return self._model.output(hidden)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Head."""
        yield f"{LAYER}.hidden_layernorm.weight", self.hidden_norm.weight
        yield f"{LAYER}.token_layernorm.weight", self.token_norm.weight
        yield from self.input.tensors()
        yield from self.layer.tensors()
        yield f"{LAYER}.final_layernorm.weight", self.norm.weight

    def norms(self) -> Iterator[Norm]:
        """See Head."""
        yield from (self.hidden_norm, self.token_norm, self.norm)
        yield from self.layer.norms()

    def linears(self) -> Iterator[Linear]:
        """See Head."""
        yield self.input
        yield from self.layer.linears()
