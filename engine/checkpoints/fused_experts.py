"""Checkpoints that have all experts of a layer as one tensor. Each expert becomes a tensor of its own here,
which is a part of the file's, so that experts have the same names in all families. Tools that quantize
experts apart give them the usual names in every family; these become the family's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.config import ModelConfig
from personae.engine.layers.dense_and_experts import experts_of
from personae.engine.layers.moe import USUAL_NAMES, FusedExperts, MoeSpec
from personae.errors import ModelLoadError

_BIAS = "_bias"


def separated(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors, with the experts of fused ones apart. Raises ModelLoadError if one has another shape."""
    found = dict(stored)
    for layer, spec in enumerate(config.layer_specs):
        moe = experts_of(spec)
        if moe is None:
            continue
        prefix = moe.within(f"model.layers.{layer}")
        _rename(found, moe, prefix)
        if moe.fused is not None:
            found |= dict(_parts(found, moe, moe.fused, prefix, config.hidden_size))
    return found


def _rename(stored: dict[str, StoredTensor], moe: MoeSpec, prefix: str) -> None:
    """Gives tensors of experts with the usual names those of the family."""
    for expert in range(moe.experts):
        for usual, own in zip(USUAL_NAMES, moe.names, strict=True):
            before = f"{prefix}.experts.{expert}.{usual}.weight"
            if own != usual and before in stored:
                stored[f"{prefix}.experts.{expert}.{own}.weight"] = stored.pop(before)


def _parts(
    stored: dict[str, StoredTensor], moe: MoeSpec, fused: FusedExperts, prefix: str, hidden: int
) -> Iterator[tuple[str, StoredTensor]]:
    """The experts' tensors of one block, by their own names. The fused ones are taken out of `stored`."""
    gate, up, down = moe.names
    wide, narrow = (2 * moe.size, hidden), (hidden, moe.size)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if fused.alternate else _halves(moe.size)
    for file_name, (outputs, inputs), cuts in (
        (fused.gate_up, wide, {gate: first, up: second}),
        (fused.down, narrow, {down: slice(None)}),
    ):
        base = f"{prefix}.{file_name}"
        whole = _take(stored, base, fused, moe.experts, outputs, inputs)
        bias = stored.pop(base + _BIAS, None) if moe.bias else None
        if bias is not None:
            _check(bias, (moe.experts, outputs))
        for expert in range(moe.experts):
            for name, rows in cuts.items():
                own = f"{prefix}.experts.{expert}.{name}"
                if whole is not None:
                    yield f"{own}.weight", whole.part(expert, rows)
                if bias is not None:
                    yield f"{own}.bias", _Fused(bias, False, outputs, 0).part(expert, rows)


def _halves(size: int) -> tuple[slice, slice]:
    return slice(0, size), slice(size, None)


def _take(
    stored: dict[str, StoredTensor], base: str, fused: FusedExperts, experts: int, outputs: int, inputs: int
) -> "_Fused | None":
    whole = stored.pop(f"{base}{fused.suffix}", None)
    if whole is None:
        return None
    _check(whole, (experts, inputs, outputs) if fused.transposed else (experts, outputs, inputs))
    return _Fused(whole, fused.transposed, outputs, inputs)


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or not tensor.served:
        raise ModelLoadError(
            f"{tensor.name}: expected {list(shape)}, found {list(tensor.shape)} {tensor.dtype}"
        )


@dataclass(frozen=True, slots=True)
class _Fused:
    """A tensor of all experts. inputs: 0 for a bias."""

    tensor: StoredTensor
    transposed: bool
    outputs: int
    inputs: int

    def part(self, expert: int, rows: slice) -> "ExpertTensor":
        """The rows of one expert, as a stored tensor."""
        count = len(range(self.outputs)[rows])
        shape = (count, self.inputs) if self.inputs else (count,)
        share = self.tensor.bytes * count // max(prod(self.tensor.shape[:1]) * self.outputs, 1)
        return ExpertTensor(
            self.tensor.name, self.tensor.file, shape, self.tensor.dtype, True, share, self, expert, rows
        )

    def read(self, expert: int) -> Tensor:
        """[outputs, inputs], or [outputs] of a bias."""
        values = self.tensor.entry(expert)
        return values.T if self.transposed else values


@dataclass(frozen=True, slots=True)
class ExpertTensor(StoredTensor):
    """Rows of one expert's part of a tensor of all experts."""

    whole: _Fused
    expert: int
    rows: slice

    def read(self) -> Tensor:
        """See `StoredTensor`."""
        return self.whole.read(self.expert)[self.rows]

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        return self.whole.tensor.kept

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`."""
        return self.whole.tensor.entry_blocks(self.expert, kind)[self.rows]
