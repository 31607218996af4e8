"""Penalties and biases: what changes logits before the grammar's mask.

A sequence uses only a few tokens of the vocabulary. So each slot has a short list of (token id, value), and
only those logits are gathered, changed and scattered back. The cost grows with the log, not with the
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personae.kernels.upload import upload

IntArray = NDArray[np.int64]


class SlotEntries:
    """For each slot a list of (token id, float32 value) on the device, with its length on the host.

    An id may be listed twice with the same value. Memory grows with the longest list so far: max_slots *
    length * 12 bytes.
    """

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros(max_slots, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(max_slots, 0, dtype=torch.float32, device=device)
        self._lengths = np.zeros(max_slots, np.int64)

    def write(self, slot: int, ids: IntArray, values: NDArray[np.float32]) -> None:
        """Set the slot's list to (ids, values)."""
        self._reserve(len(ids))
        self._ids[slot, : len(ids)] = upload(ids, self._device)
        self._values[slot, : len(ids)] = upload(values, self._device)
        self._lengths[slot] = len(ids)

    def read(self, slots: IntArray) -> tuple[Tensor, Tensor]:
        """The lists of `slots` [R] as (ids, values), both [R, longest]. A shorter list repeats its last
        entry.

        A repeated entry is scattered twice with one value, which changes nothing. No list may be empty.
        """
        rows, columns = self._places(slots)
        return self._ids[rows, columns], self._values[rows, columns]

    def count(self, slots: IntArray, tokens: Tensor) -> None:
        """Add one to the value of each slot's token, or list it with 1 if it is new. tokens: [R] int64, on
        the device.

        The host does not know the tokens, so every call appends an entry to each list. If the token is listed
        already, the appended entry repeats it with the same value.
        """
        rows, columns = self._places(slots)
        same = self._ids[rows, columns] == tokens[:, None]
        counts = self._values[rows, columns] + same
        self._values[rows, columns] = counts
        self._reserve(int(self._lengths[slots].max()) + 1)
        ends = upload(self._lengths[slots], self._device)
        self._ids[rows[:, 0], ends] = tokens
        self._values[rows[:, 0], ends] = torch.where(same, counts, 1.0).amax(1)
        self._lengths[slots] += 1

    def _places(self, slots: IntArray) -> tuple[Tensor, Tensor]:
        lengths = self._lengths[slots]
        index = upload(np.stack((slots, lengths)), self._device)
        columns = torch.arange(int(lengths.max()), device=self._device)
        return index[0][:, None], torch.minimum(columns, index[1][:, None] - 1)

    def _reserve(self, length: int) -> None:
        have = self._ids.shape[1]
        if length > have:
            more = max(length, 2 * have, 16) - have
            self._ids = torch.nn.functional.pad(self._ids, (0, more))
            self._values = torch.nn.functional.pad(self._values, (0, more))


class Penalties:
    """Repetition, frequency and presence penalties, from each slot's tokens and how often each was emitted.

    For a logit x whose token is in the prompt or was emitted, c times emitted:

        x = x / repetition  if x > 0 else  x * repetition                (HF's definition)
        x = x - frequency * c - presence * [c > 0]                       (OpenAI's definition)
    """

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._counts = SlotEntries(max_slots, device)
        self._device = device

    def admit(self, slot: int, tokens: Sequence[int], prompt_length: int) -> None:
        """Begin with a log: `tokens` is the prompt of `prompt_length` ids, followed by the emitted tokens."""
        ids, place = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
        counts = np.bincount(place[prompt_length:], minlength=len(ids)).astype(np.float32)
        self._counts.write(slot, ids, counts)

    def record(self, slots: IntArray, tokens: Tensor) -> None:
        """Count the tokens [R] that `slots` have just emitted."""
        self._counts.count(slots, tokens)

    def apply(self, logits: Tensor, rows: IntArray, slots: IntArray, factors: NDArray[np.float32]) -> None:
        """Change `logits[rows]` in place. `factors` [3, R]: repetition, frequency, presence."""
        ids, counts = self._counts.read(slots)
        index = upload(rows, self._device)[:, None]
        repetition, frequency, presence = upload(factors, self._device)[:, :, None]
        x = logits[index, ids]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits[index, ids] = x - frequency * counts - presence * (counts > 0)


class Additions:
    """Values that are added to a slot's logits: a logit bias."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._entries = SlotEntries(max_slots, device)
        self._device = device

    def admit(self, slot: int, values: dict[int, float]) -> None:
        """Set the slot's additions to `values`, by token id."""
        self._entries.write(
            slot, np.fromiter(values, np.int64), np.fromiter(values.values(), np.float32, len(values))
        )

    def apply(self, logits: Tensor, rows: IntArray, slots: IntArray) -> None:
        """Add to `logits[rows]` in place. The slots' lists are not empty."""
        ids, values = self._entries.read(slots)
        index = upload(rows, self._device)[:, None]
        logits[index, ids] = logits[index, ids] + values
