"""The model's own log-probabilities: from raw logits, before temperature, penalties and masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from personae.engine.device_event import to_host
from personae.engine.sequence import TokenLogprobs
from personae.kernels.reference_sampler import top as largest
from personae.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of R rows, not read yet: tensors on the model's device, or their copies on the
    host."""

    tokens: Tensor  # [R] int64: the chosen tokens
    chosen: Tensor  # [R] float32: their log-probabilities
    ranks: Tensor  # [R] int64, from 1: one more than the number of strictly likelier tokens
    top_values: Tensor  # [R, n] float32, largest first
    top_ids: Tensor  # [R, n] int64; of equal values the lower id first
    named: tuple[tuple[int, ...], ...] = ()  # the tokens requested by row; empty: the likeliest are
    named_values: Tensor | None = None  # [R, most requested tokens of a row] float32

    def read(self, counts: Iterable[int]) -> list[TokenLogprobs]:
        """Python values. Row i lists its `counts[i]` (at most n) likeliest tokens, or the requested ones."""
        rows = zip(
            self.tokens.tolist(),
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.top_values.tolist(),
            self.top_ids.tolist(),
            counts,
            strict=True,
        )
        found = [
            TokenLogprobs(token, value, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, value, rank, values, ids, count in rows
        ]
        if self.named_values is not None:
            for row, (ids, values) in enumerate(zip(self.named, self.named_values.tolist(), strict=True)):
                if ids:
                    top = tuple(zip(ids, values[: len(ids)], strict=True))
                    found[row] = replace(found[row], top=top)
        return found

    def naming(self, logprobs: Tensor, named: Sequence[tuple[int, ...]]) -> "LogprobRows":
        """A copy with the `named` tokens of each row looked up in `logprobs` [R, V]."""
        most = max(map(len, named))
        if not most:
            return self
        ids = np.zeros((len(named), most), np.int64)
        for row, tokens in enumerate(named):
            ids[row, : len(tokens)] = tokens
        values = logprobs.gather(1, upload(ids, logprobs.device))
        return LogprobRows(
            self.tokens,
            self.chosen,
            self.ranks,
            self.top_values,
            self.top_ids,
            tuple(named),
            values,
        )

    def to_host(self) -> "LogprobRows":
        """Copies on the host, complete once a later DeviceToHostEvent is reached."""
        return LogprobRows(
            to_host(self.tokens),
            to_host(self.chosen),
            to_host(self.ranks),
            to_host(self.top_values),
            to_host(self.top_ids),
            self.named,
            None if self.named_values is None else to_host(self.named_values),
        )


def logprob_rows(logprobs: Tensor, tokens: Tensor, top: int) -> LogprobRows:
    """Look up `tokens` [R] and the `top` likeliest in `logprobs` [R, V] (a log_softmax)."""
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    values, ids = largest(logprobs, min(top, logprobs.shape[1]))
    return LogprobRows(tokens, chosen.squeeze(1), ranks, values, ids)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of a prompt's own tokens, being copied to the host.

    first: whether the prompt's first token is among them; nothing predicts that token. parts: the rows in
    parts, with `top` alternatives each.
    """

    first: bool
    parts: tuple[LogprobRows, ...]
    top: int

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """An entry per token. The copies must be complete."""
        entries: list[TokenLogprobs | None] = [None] if self.first else []
        for part in self.parts:
            entries += part.read([self.top] * len(part.tokens))
        return tuple(entries)


def prompt_logprobs(logits: Tensor, targets: Tensor, top: int) -> LogprobRows:
    """The logits [n, V] float32 predict `targets` [n] int64. Does not wait for the device."""
    return logprob_rows(torch.log_softmax(logits, 1), targets, top).to_host()
