"""Calls the fused decoder of decoder.h through ctypes: packed weights, and a step as one call."""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from personae.kernels.attention import AttentionBatch
from personae.kernels.decoder import (
    MODULES,
    DecoderWeights,
    LayerPacked,
    LayerWeights,
    LinearWeights,
    LoraStep,
    PackedLayout,
    PackedLinear,
    PackedPlace,
    RankSums,
    Tapped,
    Weight,
)
from personae.kernels.moe import Routing
from personae.kernels.quantized import QuantizedWeight

# Formats of GGUF, in the order of formats.h.
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_0", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4")
KINDS = {kind: 1 + place for place, kind in enumerate(("int8", "int4", *BLOCKS))}  # as formats.h numbers them
LINE = 64  # bytes; packed weights begin at multiples of it
HALVES = 3  # of Instructions (instructions.h): those that have a layout of their own
MAX_GROUP = 32  # query heads that share a key/value head
MOST_IN_INT8 = 512  # numbers of a key that a cache in int8 can have; int8_rows.h has it too
_CALLBACK, _CHECK = ctypes.CFUNCTYPE(None), ctypes.CFUNCTYPE(c_int)
COUNTERS = 4096  # bytes before the slots of `RankSums`; ranks.h has it too
PANEL = 32  # rows that a slot has room for a multiple of


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _sizes(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class _Layer(ctypes.Structure):
    _fields_ = (
        *_pointers("qkv", "o", "gate_up", "down", "attention_norm", "mlp_norm"),
        *_pointers("qkv_bias", "o_bias", "gate_up_bias", "down_bias", "q_norm", "k_norm", "cos", "sin"),
        *_pointers("sinks"),
        *_sizes("window", "whole_norms"),
        *_pointers("router", "shared_gate", "experts_gate_up", "experts_down"),
        *_pointers("router_bias", "experts_gate_up_bias", "experts_down_bias", "correction"),
    )


class _Routing(ctypes.Structure):
    _fields_ = (
        *_sizes("experts", "top_k", "renormalize", "sigmoid", "groups", "kept"),
        ("scale", c_float),
        ("epsilon", c_float),
        ("least", c_float),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *_sizes("layers", "hidden", "heads", "kv_heads", "dim", "turned", "inner", "vocab"),
        ("eps", c_float),
        ("scale", c_float),
        *_pointers("embedding", "norm", "output"),
        *_sizes("rank"),
        ("routing", _Routing),
        *_sizes("experts_inner", "clamped"),
        *_pointers("embedded"),
    )


class _Module(ctypes.Structure):
    _fields_ = (
        *_pointers("a", "b"),
        *_sizes("a_layer", "b_layer"),
        *_pointers("rank", "pages"),
        *_sizes("max_pages", "inputs", "outputs"),
    )


class _Lora(ctypes.Structure):
    _fields_ = (
        *_pointers("first_row", "rows", "adapter"),
        *_sizes("segments"),
        ("module", _Module * len(MODULES)),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *_pointers("tokens", "positions", "write_index", "query_start", "kv_length", "page_table"),
        *_sizes(
            "count", "rows", "max_pages", "page_size", "page_stride", "layer_stride", "value_offset", "int8"
        ),
        *_pointers("cache", "hidden", "tapped"),
        *_sizes("taps"),
        *_pointers("kept"),
        ("lora", POINTER(_Lora)),
        ("overlap", _CALLBACK),
        *_pointers("inputs", "shared"),
        *_sizes("ranks", "slot_bytes"),
        ("check", _CHECK),
    )


class Fused:
    """The library's functions for decoders. `take`, `pack_linear` and `grouped_linear` are the backend's
    operators."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.instructions = library.personae_instructions
        self.pack = library.personae_pack
        self.pack.argtypes = [c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p]
        self.pack.restype = c_void_p
        self._packed_bytes = library.personae_packed_bytes
        self._packed_bytes.argtypes, self._packed_bytes.restype = [c_int, c_int64, c_int64, c_int], c_int64
        self.unpack = library.personae_unpack
        self.unpack.argtypes = [c_void_p]
        self.plain = library.personae_plain
        self.plain.argtypes = [c_void_p, c_void_p]
        self._rows = library.personae_rows
        self._rows.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
        self.linear = library.personae_linear
        self.linear.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int]
        self._grouped = library.personae_grouped
        self._grouped.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int]
        self.make = library.personae_decoder
        self.make.argtypes, self.make.restype = [c_void_p, c_void_p, c_int], c_void_p
        self.free = library.personae_decoder_free
        self.free.argtypes = [c_void_p]
        self.forward = library.personae_decoder_forward
        self.forward.argtypes = [c_void_p, c_void_p]
        self.logits = library.personae_decoder_logits
        self.logits.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]

    def take(
        self, weights: DecoderWeights, place: PackedPlace | None, packed: LayerPacked
    ) -> "CpuDecoder | None":
        """See `kernels.decoder.fuse`."""
        return CpuDecoder(self, weights, place, packed) if self._supports(weights) else None

    def layout(self, weights: DecoderWeights) -> PackedLayout | None:
        """See `kernels.decoder.packed_layout`."""
        if not self._supports(weights):
            return None
        kinds = [_kind(weight) for weight, _ in _weights(weights)]
        size = sum(map(_aligned, self.packed_bytes(weights)))
        return PackedLayout(size, f"{self.instructions(-1) == HALVES} {kinds}")

    def packed_bytes(self, weights: DecoderWeights) -> list[int]:
        """The bytes of each packed weight."""
        return [
            self._packed_bytes(_kind(weight), *weight.shape, paired) for weight, paired in _weights(weights)
        ]

    def _supports(self, weights: DecoderWeights) -> bool:
        """Bfloat16, and sizes that fill whole registers."""
        hidden, experts = weights.embedding.shape[1], _experts_shapes(weights)
        inner = (_inner(weights), *(shape[-1] for shape in experts))
        return (
            weights.dtype is torch.bfloat16
            and not any(size % 32 for size in (hidden, *inner, weights.head_dim, *_rotated(weights)))
            and len(experts) <= 1
            and len(_activations(weights)) == 1
            and weights.head_dim <= MOST_IN_INT8
            and weights.heads // weights.kv_heads <= MAX_GROUP
            and all(isinstance(weight, Tensor) or weight.kind in KINDS for weight, _ in _weights(weights))
        )

    def pack_linear(self, linear: LinearWeights, dtype: torch.dtype) -> "CpuLinear | None":
        """See `kernels.decoder.pack_linear`."""
        weight = linear.weight
        known = weight.dtype is dtype if isinstance(weight, Tensor) else weight.kind in KINDS
        return CpuLinear(self, linear) if known and dtype is torch.bfloat16 else None

    def lookup(self, packed: PackedLinear, outputs: Tensor) -> Tensor:
        """See `kernels.decoder.Lookup`."""
        linear = cast(CpuLinear, packed)
        rows = torch.empty(len(outputs), linear.inputs, dtype=torch.bfloat16)
        self._rows(linear.handle, outputs.contiguous().data_ptr(), len(outputs), rows.data_ptr())
        return rows

    def grouped_linear(self, x: Tensor, weights: Sequence[PackedLinear], counts: Sequence[int]) -> Tensor:
        """See `kernels.moe.GroupedLinear`."""
        handles = (c_void_p * len(weights))(*(cast(CpuLinear, weight).handle for weight in weights))
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], cast(CpuLinear, weights[0]).outputs, dtype=x.dtype)
        rows = (c_int64 * len(counts))(*counts)
        self._grouped(
            handles, rows, len(counts), x.data_ptr(), x.stride(0), y.data_ptr(), torch.get_num_threads()
        )
        return y


def _rotated(weights: DecoderWeights) -> set[int]:
    """How many dimensions of a head the layers rotate."""
    return {2 * layer.rope[0].shape[1] for layer in weights.layers if layer.rope} or {0}


def _activations(weights: DecoderWeights) -> set[bool]:
    """Whether the layers' activations are clamped."""
    return {layer.clamped for layer in weights.layers}


def _inner(weights: DecoderWeights) -> int:
    """The width of the widest inner vectors, without those of experts."""
    return max((layer.mlp.down.weight.shape[1] for layer in weights.layers if layer.mlp), default=0)


def _experts_shapes(weights: DecoderWeights) -> set[tuple[Routing, int, int]]:
    """Of the layers with experts: how they choose, how many experts they have, and the width of their inner
    vectors."""
    of = (layer.experts for layer in weights.layers)
    return {(one.routing, len(one.mlps), one.mlps[0].down.weight.shape[1]) for one in of if one is not None}


def _weights(decoder: DecoderWeights) -> Iterator[tuple[Weight, bool]]:
    """Of all linear modules, in the order in which they are packed, and whether they are two halves."""
    yield decoder.output, False
    if _own_bits(decoder):
        yield decoder.embedding, False
    for layer in decoder.layers:
        for linear, paired in _modules(layer):
            yield linear.weight, paired


def _own_bits(decoder: DecoderWeights) -> bool:
    """Whether the embedding is quantized and is not the output matrix."""
    return isinstance(decoder.embedding, QuantizedWeight) and decoder.embedding is not decoder.output


def _modules(layer: LayerWeights) -> Iterator[tuple[LinearWeights, bool]]:
    """The linear modules of a layer, in the order of `LayerPacked`, and whether they are two halves."""
    yield layer.qkv, False
    yield layer.o, False
    if layer.experts is not None:
        yield layer.experts.router, False
        yield from ((mlp.gate_up, True) for mlp in layer.experts.mlps)
        yield from ((mlp.down, False) for mlp in layer.experts.mlps)
    if layer.mlp is not None:
        yield layer.mlp.gate_up, True
        yield layer.mlp.down, False
    if layer.experts is not None and layer.experts.shared_gate is not None:
        yield layer.experts.shared_gate, False


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE


def _kind(weight: Weight) -> int:
    return 0 if isinstance(weight, Tensor) else KINDS[weight.kind]


def _tensors(weight: Weight) -> tuple[Tensor | None, ...]:
    """A weight for `personae_pack`: its elements, steps and scales."""
    if isinstance(weight, Tensor):
        return weight.contiguous(), None, None
    if weight.kind in BLOCKS:
        return weight.tensors()[0].contiguous(), None, None
    scales, elements, *steps = (tensor.contiguous() for tensor in weight.tensors())
    return elements, steps[0] if steps else None, scales


def _parts(place: PackedPlace, sizes: Sequence[int]) -> Iterator[PackedPlace]:
    """The place of each weight, one after the other."""
    for part in torch.split(place.memory, list(map(_aligned, sizes))):
        yield PackedPlace(part, place.filled)


class CpuLinear:
    """See `kernels.decoder.PackedLinear`. Holds the packed weight until it is collected. `place`: where that
    lies, memory of its own if None."""

    def __init__(
        self, calls: Fused, linear: LinearWeights, place: PackedPlace | None = None, *, paired: bool = False
    ) -> None:
        weight = linear.weight
        filled = place is not None and place.filled
        tensors = (None, None, None) if filled else _tensors(weight)
        self._calls, self._place = calls, place
        self.outputs, self.inputs = weight.shape
        # Padded as `multiply` (product.h) expects.
        self.bias = None if linear.bias is None else functional.pad(linear.bias.float(), (0, 32))
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        memory = None if place is None else place.memory.data_ptr()
        handle = calls.pack(_kind(weight), *addresses, self.outputs, self.inputs, paired, memory)
        if handle is None:
            raise MemoryError(f"not enough memory for a packed weight of {self.outputs} x {self.inputs}")
        self.handle: int = handle
        weakref.finalize(self, calls.unpack, handle)

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], self.outputs, dtype=x.dtype)
        bias = None if self.bias is None else self.bias.data_ptr()
        self._calls.linear(
            self.handle,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            bias,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def plain(self) -> Tensor:
        """See `PackedLinear`."""
        weight = torch.empty(self.outputs, self.inputs, dtype=torch.bfloat16)
        self._calls.plain(self.handle, weight.data_ptr())
        return weight


class CpuDecoder:
    """See `kernels.decoder.FusedDecoder`."""

    def __init__(
        self, calls: Fused, weights: DecoderWeights, place: PackedPlace | None, handed: LayerPacked
    ) -> None:
        self._calls = calls
        self._kept: list[Tensor | CpuLinear | ctypes.Array[c_void_p]] = []
        parts = None if place is None else _parts(place, calls.packed_bytes(weights))

        def packed(linear: LinearWeights, paired: bool = False) -> CpuLinear:
            return CpuLinear(calls, linear, None if parts is None else next(parts), paired=paired)

        self.output = packed(LinearWeights(weights.output, None))
        self.embedding: CpuLinear | None = None
        if isinstance(weights.embedding, QuantizedWeight):
            own = _own_bits(weights)
            self.embedding = packed(LinearWeights(weights.embedding, None)) if own else self.output
        self._hidden = weights.embedding.shape[1]
        self._vocab = weights.output.shape[0]
        self._logits = torch.empty(0, self._vocab)
        turned, inner, experts = max(_rotated(weights)), _inner(weights), _experts_shapes(weights)
        clamped = any(_activations(weights))
        layers = []
        for number, layer in enumerate(weights.layers):
            linears = tuple(packed(*module) for module in _modules(layer))
            self._kept += linears
            layers.append(self._layer(layer, iter(linears), weights.head_dim))
            handed(number, linears)
        shape = _Shape(
            len(layers),
            self._hidden,
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            turned,
            inner,
            self._vocab,
            weights.eps,
            weights.head_dim**-0.5,
            self._keep(weights.embedding) if isinstance(weights.embedding, Tensor) else None,
            self._keep(weights.norm.float()),
            self.output.handle,
            weights.rank,
            *next(((_routing(*shape[:2]), shape[2]) for shape in experts), (_Routing(), 0)),
            clamped,
            None if self.embedding is None else self.embedding.handle,
        )
        array = (_Layer * len(layers))(*layers)
        self._handle = calls.make(byref(shape), array, torch.get_num_threads())
        weakref.finalize(self, calls.free, self._handle)

    def _keep(self, tensor: Tensor) -> int:
        """The tensor's address, valid for as long as this decoder lives."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep_addresses(self, addresses: Iterable[int | None]) -> int:
        """The address of an array of addresses."""
        each = list(addresses)
        array = (c_void_p * len(each))(*each)
        self._kept.append(array)
        return ctypes.addressof(array)

    def _layer(self, layer: LayerWeights, linears: Iterator[CpuLinear], head_dim: int) -> _Layer:
        """`linears`: as `_modules` has them."""
        norms, experts = layer.qk_norms or (None, None), layer.experts
        qkv, o, router = next(linears), next(linears), None
        handles: list[int | None] = [None, None]  # of the experts' gate_up, and of their down
        biases: list[int | None] = [None, None]
        if experts is not None:
            router = next(linears)
            for half in range(2):
                each = list(islice(linears, len(experts.mlps)))
                handles[half] = self._keep_addresses(one.handle for one in each)
                if each[0].bias is not None:
                    biases[half] = self._keep_addresses(_bias(one) for one in each)
        gate_up, down, shared_gate = (next(linears, None) for _ in range(3))
        common = (qkv, o, gate_up, down)
        return _Layer(
            *(None if linear is None else linear.handle for linear in common),
            self._keep(layer.attention_norm.float()),
            self._keep(layer.mlp_norm.float()),
            *map(_bias, common),
            *(None if norm is None else self._keep(norm.float()) for norm in norms),
            *(self._keep(table) for table in layer.rope) if layer.rope else (None, None),
            None if layer.sinks is None else self._keep(layer.sinks),
            layer.window or 0,
            norms[0] is not None and norms[0].shape[0] != head_dim,
            None if router is None else router.handle,
            None if shared_gate is None else shared_gate.handle,
            *handles,
            _bias(router),
            *biases,
            None if experts is None or experts.correction is None else self._keep(experts.correction),
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        lora: LoraStep | None,
        overlap: Callable[[], None] | None = None,
        tapped: Tapped | None = None,
        sums: RankSums | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """See `FusedDecoder.forward`."""
        failures: list[BaseException] = []
        first = _CALLBACK() if overlap is None else _CALLBACK(partial(_store_failure, failures, overlap))
        check = _CHECK() if sums is None else _CHECK(partial(_store_failure, failures, sums.check))
        slot_bytes = 0 if sums is None else _slot_bytes(sums)
        hidden = torch.empty(tokens.shape[0], self._hidden)
        tapping = () if tapped is None else tapped.layers
        layers = (c_int64 * len(tapping))(*tapping)
        call = _Batch(
            tokens.data_ptr(),
            positions.data_ptr(),
            batch.write_index.data_ptr(),
            batch.query_start.data_ptr(),
            batch.kv_length.data_ptr(),
            batch.page_table.data_ptr(),
            tokens.shape[0],
            batch.kv_length.shape[0],
            batch.page_table.shape[1],
            cache.shape[4],
            cache.stride(2),
            cache.stride(0),
            cache.stride(1),
            cache.dtype is torch.int8,
            cache.data_ptr(),
            hidden.data_ptr(),
            None if tapped is None else ctypes.addressof(layers),
            len(layers),
            None if tapped is None else tapped.values.data_ptr(),
            None if lora is None else ctypes.pointer(_lora(lora)),
            first,
            None if inputs is None else inputs.data_ptr(),
            None if sums is None else sums.memory.data_ptr(),
            1 if sums is None else sums.ranks,
            slot_bytes,
            check,
        )
        self._calls.forward(self._handle, byref(call))
        if failures:
            raise failures[0]
        return hidden

    def adds_up(self, count: int, sums: RankSums) -> bool:
        """See `FusedDecoder.adds_up`."""
        return -(-count // PANEL) * PANEL * self._hidden * 4 <= _slot_bytes(sums)

    def logits(self, hidden: Tensor, logit_mask: Tensor | None = None) -> Tensor:
        """See `FusedDecoder.logits`."""
        hidden, rows = hidden.contiguous(), hidden.shape[0]
        if rows > self._logits.shape[0]:
            self._logits = torch.empty(rows, self._vocab)
        assert logit_mask is None or logit_mask.is_contiguous()
        words = None if logit_mask is None else logit_mask.data_ptr()
        self._calls.logits(self._handle, hidden.data_ptr(), rows, words, self._logits.data_ptr())
        return self._logits[:rows]


def _bias(linear: CpuLinear | None) -> int | None:
    """The address of a module's bias."""
    return None if linear is None or linear.bias is None else linear.bias.data_ptr()


def _slot_bytes(sums: RankSums) -> int:
    """The room for a rank's part of a sum: each rank has two, at multiples of 64 bytes."""
    return (sums.memory.nbytes - COUNTERS) // (2 * sums.ranks) // LINE * LINE


def _store_failure(failures: list[BaseException], work: Callable[[], None]) -> bool:
    """Calls `work` and stores its exception, which cannot pass through C. Returns whether there was none."""
    try:
        work()
    except BaseException as failure:  # raised again after the C function has returned
        failures.append(failure)
        return False
    return True


def _routing(routing: Routing, experts: int) -> _Routing:
    return _Routing(
        experts,
        routing.top_k,
        routing.renormalize,
        routing.score == "sigmoid",
        routing.groups,
        routing.kept,
        routing.scale,
        routing.epsilon,
        routing.least,
    )


def _lora(lora: LoraStep) -> _Lora:
    stacks = map(lora.stacks.get, MODULES)
    modules = [
        _Module()
        if stack is None
        else _Module(
            stack.a.data_ptr(),
            stack.b.data_ptr(),
            stack.a.stride(0),
            stack.b.stride(0),
            stack.table.rank.data_ptr(),
            stack.table.pages.data_ptr(),
            stack.table.pages.shape[1],
            stack.a.shape[2],
            stack.b.shape[2],
        )
        for stack in stacks
    ]
    work = lora.work
    return _Lora(
        work.first_row.data_ptr(),
        work.rows.data_ptr(),
        work.adapter.data_ptr(),
        work.rows.shape[0],
        (_Module * len(MODULES))(*modules),
    )
