"""The fused decoder: transformers' arithmetic, and a row's bits that do not depend on its company.

With weights in bfloat16, int8 and int4, and with each kind of instructions that there is; also as the first
servers with AVX-512 have the kernels, which know no products of bfloat16, and as laptops do, which know AVX2.
"""

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import hf_logits, hf_model, quantized, relative_error
from paged import PagedSequences, layer_by_layer
from safetensors import safe_open
from tiny_adapters import lora_shapes, make_adapter_folder
from tiny_models import VOCAB, model_folder

from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import WEIGHT_ONLY, scheme_of
from personae.kernels import registry
from personae.kernels.cpu import operators
from personae.kernels.cpu.build import library
from personae.kernels.cpu.fused import CpuLinear, Fused
from personae.kernels.decoder import LinearWeights
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.reference import round_inputs
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch, work_list

pytestmark = pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX2 on this machine")
CPU = torch.device("cpu")
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama tied, with biases": ("llama", {**BIASED, "tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "head_dim": 96}),
    "mistral, windowed": ("mistral", {"head_dim": 32}),
    "qwen2, upper layers windowed": ("qwen2", {"use_sliding_window": True, "head_dim": 64}),
    "qwen3": ("qwen3", {"hidden_size": 96}),
    "phi3, half of the head rotated": ("phi3", {"head_dim": 64, "partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"head_dim": 32}),
}


@dataclass(frozen=True)
class Way:
    """Which instructions multiply, and how the weights are kept. The machine's own (""): few bits are always
    multiplied by the same ones."""

    instructions: str
    quantize: str | None = None
    machine: str = ""  # whose library it is, a fixture: skylake, laptop; "": this one's

    def decoder(self, folder: Path) -> Decoder:
        decoder = load_model(folder, device=CPU, quantize=self.quantize)
        assert decoder._fused is not None
        return decoder

    def truth(self, folder: Path) -> Any:
        """transformers' model with the same weights, for float32 arithmetic."""
        return quantized(hf_model(folder), self.quantize) if self.quantize else hf_model(folder)

    @property
    def rounding(self) -> float:
        """How far logits may be from those in float32, relative to them. With few bits, inputs are rounded to
        255 levels, which changes a product by 0.006. These random models make 0.036 of that."""
        return 0.05 if self.quantize else 0.02


INSTRUCTIONS = ("floats", "pairs", "tiles", "halves")  # as instructions.h numbers them
WAYS = {
    **{name: Way(name) for name in INSTRUCTIONS},
    **{kept: Way("", kept) for kept in WEIGHT_ONLY},
    **{
        f"{kept}, {machine}": Way("floats", kept, machine=machine)
        for machine in ("skylake", "laptop")
        for kept in (None, *WEIGHT_ONLY)
    },
}


def use(there: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    """The decoder is that of this library."""
    fused = Fused(there)
    for name, run in (("fuse", fused.take), ("pack_linear", fused.pack_linear)):
        own = registry.operators("cpu")
        patch.setitem(own, name, replace(own[name], run=run))


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    wanted = request.param
    found = request.getfixturevalue(wanted.machine) if wanted.machine else library()
    assert found is not None
    if wanted.machine:
        use(found, monkeypatch)
    before = found.personae_instructions(-1)
    number = INSTRUCTIONS.index(wanted.instructions) if wanted.instructions else before
    if found.personae_instructions(number) != number:
        pytest.skip("not on this machine")
    yield wanted
    found.personae_instructions(before)


def folder_of(variant: str) -> Path:
    family, overrides = VARIANTS[variant]
    return model_folder(family, torch_dtype="bfloat16", **overrides)


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def all_logits(decoder: Decoder, prompt: list[int], **pages: Any) -> torch.Tensor:
    hidden, _ = PagedSequences(decoder, **pages).forward({"a": prompt})
    return decoder.logits(hidden).clone()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_and_no_worse_than_layer_by_layer(variant: str, way: Way) -> None:
    folder = folder_of(variant)
    prompt = tokens_of(1, 150)
    truth = hf_logits(way.truth(folder), prompt)
    decoder = way.decoder(folder)
    fused = all_logits(decoder, prompt)
    with layer_by_layer(decoder):
        layered = all_logits(decoder, prompt)
    assert fused.dtype == torch.float32
    errors = [float((found - truth).norm() / truth.norm()) for found in (fused, layered)]
    assert errors[0] < way.rounding
    assert errors[0] < 1.1 * errors[1]


def some_words(rows: int, seed: int) -> torch.Tensor:
    """A bitmask [rows, words]: of a row all bits, none, or one in few or many of its words."""
    rng = random.Random(seed)
    logit_mask = torch.zeros(rows, -(-VOCAB // 32), dtype=torch.int32)
    for row in range(rows):
        share = (0.0, 1.0, 0.03, 0.5)[row % 4]
        for word in range(logit_mask.shape[1]):
            if rng.random() < share:
                logit_mask[row, word] = -1 if share == 1.0 else 1 << rng.randrange(31)
    return logit_mask


@pytest.mark.parametrize("rows", [1, 3, 7, 70])
def test_logits_that_are_needed_have_the_same_bits_and_those_that_nobody_needs_are_not_computed(
    rows: int, way: Way
) -> None:
    decoder = way.decoder(folder_of("llama"))
    hidden, _ = PagedSequences(decoder).forward({"a": tokens_of(3, rows)})
    every = decoder.logits(hidden).clone()
    logit_mask = some_words(rows, rows)
    decoder.logits(hidden).fill_(torch.nan)
    found = decoder.logits(hidden, logit_mask=logit_mask)
    wanted = (logit_mask != 0).repeat_interleave(32, 1)[:, :VOCAB]
    assert torch.equal(found[wanted], every[wanted])
    assert found[:, ~wanted.any(0)].isnan().all()
    computed = ~found.isnan()
    assert torch.equal(found[computed], every[computed])
    if rows == 70:
        assert computed.float().mean() < 0.75, "rows that need much come first"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_has_the_same_bits_prefilled_chunked_decoded_and_in_company(variant: str, way: Way) -> None:
    decoder = way.decoder(folder_of(variant))
    prompt = tokens_of(2, 100)
    whole = all_logits(decoder, prompt)
    parts = PagedSequences(decoder, page_size=8, seed=1)
    company = {name: tokens_of(seed, 3 * seed) for seed, name in enumerate("bcde", 1)}
    at = 0
    for number, count in enumerate([1, 1, 7, 33, 1, 16, 40, 1]):
        others = {
            name: tokens[number : number + 1] if number else tokens[:1] for name, tokens in company.items()
        }
        others = {name: tokens for name, tokens in others.items() if tokens}
        found = parts.step({**others, "a": prompt[at : at + count]})["a"]
        at += count
        assert torch.equal(found, whole[at - 1])
    assert at == len(prompt)


def test_the_number_of_threads_does_not_show(way: Way) -> None:
    folder, prompt = folder_of("qwen3"), tokens_of(3, 70)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(all_logits(way.decoder(folder), prompt))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_long_contexts_and_steps_of_many_rows(way: Way) -> None:
    folder = folder_of("llama")
    decoder = way.decoder(folder)
    prompt = tokens_of(4, 1000)
    assert relative_error(all_logits(decoder, prompt)[-1], hf_logits(way.truth(folder), prompt)[-1]) < 0.05
    together = PagedSequences(decoder)
    step = together.step({f"{i}": prompt[i : i + 2] for i in range(40)})
    for i in (0, 17, 39):
        assert torch.equal(step[f"{i}"], PagedSequences(decoder).step({"a": prompt[i : i + 2]})["a"])


def test_rows_and_weights_that_no_cache_holds_have_the_bits_of_small_steps(way: Way) -> None:
    decoder = way.decoder(model_folder("llama", torch_dtype="bfloat16", head_dim=32, intermediate_size=1536))
    prompt = tokens_of(5, 420)
    whole = all_logits(decoder, prompt)
    parts, at = PagedSequences(decoder), 0
    for count in (32, 1, 16, 31, 40, 299, 1):
        found = parts.step({"a": prompt[at : at + count]})["a"]
        at += count
        assert torch.equal(found, whole[at - 1])
    assert at == len(prompt)


RANKS = {"small": 3, "eight": 8, "wide": 64, "odd": 13}


def pool_of(folder: Path, to: Path, dtype: torch.dtype) -> tuple[LoraPool, dict[str, int]]:
    """A pool of adapters of several ranks, one of them on two modules only, and their slots."""
    shapes = lora_shapes(folder)
    pool = LoraPool(shapes, capacity_rows=192, max_adapters=8, dtype=dtype, device=CPU)
    slots = {}
    for seed, (name, rank) in enumerate({**RANKS, "partial": 16}.items()):
        targets = {"targets": ("k_proj", "up_proj")} if name == "partial" else {}
        path = make_adapter_folder(to / name, folder, rank=rank, seed=seed, **targets)
        adapter = read_adapter(path, shapes)
        slots[name] = pool.load(adapter)
        pool.pin(adapter.digest)
    return pool, slots


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoraPool, dict[str, int]]:
    folder = model_folder("llama", torch_dtype="bfloat16", head_dim=32)
    return folder, *pool_of(folder, tmp_path_factory.mktemp("bfloat16"), torch.bfloat16)


def batch_of(pool: LoraPool, slots: list[int | None], counts: list[int]) -> LoraBatch:
    return LoraBatch(pool, work_list(slots, counts, CPU))


def test_adapters_change_what_they_change_layer_by_layer(
    pooled: tuple[Path, LoraPool, dict[str, int]], way: Way
) -> None:
    folder, pool, slots = pooled
    decoder = way.decoder(folder)
    names = [*slots, None]
    counts = [1, 9, 2, 5, 1, 3]
    chunks = {f"{name}": tokens_of(seed, counts[seed]) for seed, name in enumerate(names)}
    lora = batch_of(pool, [None if name is None else slots[name] for name in names], counts)
    fused = {name: logits.clone() for name, logits in PagedSequences(decoder).step(chunks, lora).items()}
    plain = {name: logits.clone() for name, logits in PagedSequences(decoder).step(chunks).items()}
    with layer_by_layer(decoder):
        layered = PagedSequences(decoder).step(chunks, lora)
    for name in chunks:
        assert relative_error(fused[name], layered[name]) < (0.09 if way.quantize else 0.05)
        assert (relative_error(fused[name], plain[name]) > 0.05) == (name != "None")
    assert torch.equal(fused["None"], plain["None"])


def test_an_adapters_rows_have_the_same_bits_alone_and_among_other_adapters(
    pooled: tuple[Path, LoraPool, dict[str, int]], way: Way
) -> None:
    folder, pool, slots = pooled
    decoder = way.decoder(folder)
    prompts = {name: tokens_of(seed, 20) for seed, name in enumerate(slots)}
    together = PagedSequences(decoder, seed=3)
    mixed = {}
    for first, last in ((0, 12), (12, 13), (13, 20)):
        lora = batch_of(pool, list(slots.values()), [last - first] * len(slots))
        found = together.step({name: prompt[first:last] for name, prompt in prompts.items()}, lora)
        mixed = {name: logits.clone() for name, logits in found.items()}
    for name, slot in slots.items():
        alone = PagedSequences(decoder).step({name: prompts[name]}, batch_of(pool, [slot], [20]))[name]
        assert torch.equal(alone, mixed[name])


def test_an_adapters_token_has_the_same_bits_in_prompts_of_any_length_and_decoded(
    tmp_path: Path, way: Way
) -> None:
    """Few rows of an adapter and many take different ways, and runs begin and end anywhere in tiles."""
    folder = model_folder("llama", torch_dtype="bfloat16", intermediate_size=1600, **BIASED)
    shapes = lora_shapes(folder)
    pool = LoraPool(shapes, capacity_rows=256, max_adapters=8, dtype=torch.bfloat16, device=CPU)
    slots: dict[str, int | None] = {}
    for seed, rank in enumerate((3, 8, 64, 13, 40)):
        path = make_adapter_folder(tmp_path / f"{seed}", folder, rank=rank, seed=seed)
        slots[f"rank {rank}"] = pool.load(read_adapter(path, shapes))
    slots["base"] = None
    prompts = {name: tokens_of(seed, 70 + 9 * seed) for seed, name in enumerate(slots)}
    before = torch.get_num_threads()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in slots}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            decoder = way.decoder(folder)
            for company in (list(slots), *([name] for name in slots)):
                for cuts in ((1000,), (17, 58, 66, 69, 1000), (5, 6, 50, 1000)):
                    sequences = PagedSequences(decoder)
                    for first, last in pairwise((0, *cuts)):
                        step = {name: prompts[name][first:last] for name in company if prompts[name][first:]}
                        counts = [len(tokens) for tokens in step.values()]
                        lora = batch_of(pool, [slots[name] for name in step], counts)
                        logits = sequences.step(step, lora)
                    for name, row in logits.items():
                        found[name].append(row.clone())
    finally:
        torch.set_num_threads(before)
    for rows in found.values():
        assert len(rows) == 12
        assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("machine", ["skylake", "laptop"])
@pytest.mark.parametrize("quantize", [None, *WEIGHT_ONLY])
def test_floats_are_the_same_whatever_vectors_the_processor_has(
    quantize: str | None, machine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt, here = folder_of("qwen3"), tokens_of(8, 70), library()
    assert here is not None
    before = here.personae_instructions(-1)
    here.personae_instructions(INSTRUCTIONS.index("floats"))
    try:
        found = all_logits(load_model(folder, device=CPU, quantize=quantize), prompt)
    finally:
        here.personae_instructions(before)
    use(request.getfixturevalue(machine), monkeypatch)
    there = all_logits(load_model(folder, device=CPU, quantize=quantize), prompt)
    if machine == "skylake":
        assert torch.equal(there, found)
    else:  # the compiler fuses other multiplications with additions, between the products
        assert relative_error(there, found) < (0.05 if quantize else 0.003)


def test_prompts_with_adapters_are_those_in_float32_and_no_worse_than_the_layers_one_by_one(
    pooled: tuple[Path, LoraPool, dict[str, int]], way: Way, tmp_path: Path
) -> None:
    folder, pool, slots = pooled
    decoder = way.decoder(folder)
    chunks = {name: tokens_of(seed, 30 + 7 * seed) for seed, name in enumerate([*slots, "base"])}
    counts = [len(tokens) for tokens in chunks.values()]
    lora = batch_of(pool, [*slots.values(), None], counts)
    exact = load_model(folder, device=CPU, dtype="float32", quantize=way.quantize)
    wide, places = pool_of(folder, tmp_path, torch.float32)
    truth, _ = PagedSequences(exact).forward(chunks, batch_of(wide, [*places.values(), None], counts))
    found, _ = PagedSequences(decoder).forward(chunks, lora)
    fused = found.clone()
    plain, _ = PagedSequences(decoder).forward(chunks)
    with layer_by_layer(decoder):
        layered, _ = PagedSequences(decoder).forward(chunks, lora)
    ends = torch.tensor(counts).cumsum(0).tolist()
    errors = [float((found - truth).norm() / truth.norm()) for found in (fused, layered.float())]
    assert errors[0] < way.rounding
    assert errors[0] < errors[1]
    for name, first, last in zip(chunks, [0, *ends], ends, strict=False):
        assert (relative_error(fused[first:last], plain[first:last]) > 0.04) == (name != "base")
    assert torch.equal(fused[ends[-2] :], plain[ends[-2] :])


@pytest.mark.parametrize(
    ("dtype", "overrides"),
    [("float32", {"head_dim": 32}), ("bfloat16", {"head_dim": 24}), ("bfloat16", {"intermediate_size": 72})],
)
def test_other_dtypes_and_shapes_go_layer_by_layer(dtype: str, overrides: dict[str, int]) -> None:
    folder = model_folder("llama", torch_dtype=dtype, **overrides)
    decoder = load_model(folder, device=CPU)
    assert decoder._fused is None
    prompt = tokens_of(5, 30)
    last = PagedSequences(decoder).step({"a": prompt})["a"]
    assert relative_error(last, hf_logits(hf_model(folder), prompt)[-1]) < 0.05


def test_packed_weights_can_be_had_back() -> None:
    folder = folder_of("llama tied, with biases")
    decoder = load_model(folder, device=CPU)
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        found = decoder.layers[1].mlp.gate_up.plain()
        truth = [stored.get_tensor(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up")]
        assert torch.equal(found, torch.cat(truth))
        assert torch.equal(decoder.output.plain(), stored.get_tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize("quantize", WEIGHT_ONLY)
def test_packed_quantized_weights_can_be_had_back_in_bfloat16(quantize: str) -> None:
    folder = folder_of("llama, one KV head")
    decoder, truth = load_model(folder, device=CPU, quantize=quantize), quantized(hf_model(folder), quantize)
    mlp = truth.model.layers[1].mlp
    found = decoder.layers[1].mlp.gate_up.plain()
    assert torch.equal(found, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16())
    assert torch.equal(decoder.output.plain(), truth.lm_head.weight.bfloat16())


@pytest.mark.parametrize(("quantize", "least", "most"), [("int8", 0.001, 0.05), ("int4", 0.05, 0.4)])
def test_fewer_bits_are_another_model_than_bfloat16_and_near_it(
    quantize: str, least: float, most: float
) -> None:
    folder, prompt = folder_of("qwen3"), tokens_of(7, 60)
    one, other = (
        all_logits(load_model(folder, device=CPU, quantize=way), prompt) for way in (None, quantize)
    )
    assert least < float((one - other).norm() / one.norm()) < most


HALVES = pytest.mark.parametrize("way", [Way("halves")], indirect=True)


def product(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    backend = registry.operators("cpu")["fuse"].run.__self__
    return CpuLinear(backend, LinearWeights(weight, None))(x)


@HALVES
def test_float16_holds_outputs_and_inputs_of_any_size_and_outliers_beside_small_ones(way: Way) -> None:
    torch.manual_seed(0)
    outputs, inputs = 70, 328
    weight = torch.randn(outputs, inputs) * torch.logspace(-15, 15, outputs)[:, None]
    weight[:, 7] *= 300
    weight[3] = 0
    weight = weight.bfloat16()
    for size in (1e-15, 1e-4, 1.0, 1e4, 1e15):
        x = torch.randn(40, inputs) * size
        x[:, 50] *= 1000
        x[:, 64:96] *= 1e-3
        x[1] = 0
        x = x.bfloat16()
        truth = x.double() @ weight.double().T
        errors = (product(x, weight).double() - truth).norm(dim=0) / truth.norm(dim=0).clamp_min(1e-30)
        assert errors.max() < 0.004  # an answer in bfloat16 is off by half of that


@HALVES
def test_float16_sums_do_not_overflow_and_what_is_not_finite_stays_so(way: Way) -> None:
    largest = torch.full((33, 1000), 3e38).bfloat16()
    weight = torch.full((40, 1000), 1.99).bfloat16()
    assert torch.equal(product(largest * 1e-6, weight), (largest * 1e-6) @ weight.T)
    assert product(largest, weight).isposinf().all()
    for wrong in (torch.inf, torch.nan):
        x = torch.ones(2, 1000).bfloat16()
        x[1, 10] = wrong
        found = product(x, weight)
        assert found[0].isfinite().all()
        assert not found[1].isfinite().any()


@pytest.mark.parametrize("way", [way for way in WAYS.values() if way.quantize], indirect=True)
def test_rows_of_any_size_keep_their_precision_in_few_bits(way: Way) -> None:
    """A row's scale may be anything that a float is; widening takes less from products than rounding does."""
    assert way.quantize is not None
    rows, inputs = 70, 100
    weight = torch.randn(rows, inputs) * torch.logspace(-25, 25, rows)[:, None]
    weight[:, 32:48] *= 1e-2  # steps of few bits
    weight[3] = 0
    kept = scheme_of(way.quantize)(["x"]).kept.empty(rows, inputs, CPU)
    kept.copy_(weight)
    for size in (1e-4, 1.0, 1e4):
        x = (torch.randn(40, inputs) * size).bfloat16()
        truth = round_inputs(x).double() @ kept.plain(torch.float64).T
        errors = (product(x, kept).double() - truth).norm(dim=0) / truth.norm(dim=0).clamp_min(1e-37)
        assert errors.max() < 0.004


def test_what_lies_beyond_a_sequence_may_be_nan(way: Way) -> None:
    decoder = way.decoder(folder_of("llama"))
    sequences = PagedSequences(decoder, page_size=16)  # its cache is NaN until it is written
    for length in (1, 15, 2, 16):
        assert sequences.step({f"{length}": tokens_of(6, length)})[f"{length}"].isfinite().all()


IN_INT8 = (
    *(Way(name) for name in INSTRUCTIONS[:3]),
    *(Way("floats", machine=machine) for machine in ("skylake", "laptop")),
)


@pytest.mark.parametrize("way", IN_INT8, indirect=True)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_in_int8_is_near_one_in_bfloat16_and_no_worse_than_layer_by_layer(
    variant: str, way: Way
) -> None:
    decoder, prompt = way.decoder(folder_of(variant)), tokens_of(1, 150)

    def error() -> float:
        truth, found = (all_logits(decoder, prompt, kv_dtype=dtype) for dtype in (None, torch.int8))
        return float((found - truth).norm() / truth.norm())

    fused = error()
    with layer_by_layer(decoder):
        layered = error()
    assert 0 < fused < 0.05
    assert fused < 1.2 * layered


@pytest.mark.parametrize("way", IN_INT8, indirect=True)
def test_a_token_has_the_same_bits_in_company_with_a_cache_in_int8(way: Way) -> None:
    decoder, prompt = way.decoder(folder_of("llama")), tokens_of(2, 100)
    whole = all_logits(decoder, prompt, kv_dtype=torch.int8)
    parts = PagedSequences(decoder, page_size=8, seed=1, kv_dtype=torch.int8)
    at = 0
    for number, count in enumerate([1, 1, 7, 33, 1, 16, 40, 1]):
        other = {"b": tokens_of(5 + number, 3 + number)}
        found = parts.step({**other, "a": prompt[at : at + count]})["a"]
        at += count
        assert torch.equal(found, whole[at - 1])
