"""Weighted adapters together are what PEFT's `add_weighted_adapter` makes of them."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from tiny_adapters import lora_shapes, make_adapter, make_adapter_folder, tiny_config

from personae.errors import AdapterError
from personae.lora.adapter import make_adapter as adapter_of
from personae.lora.dora import DoraBias
from personae.lora.library import AdapterLibrary
from personae.lora.mix import mixed
from personae.lora.mix_id import mix_id, parts_of
from personae.lora.peft import read_adapter
from personae.lora.sites import PROJECTIONS
from personae.lora.writing import made_ready

BASE = tiny_config()
SHAPES = lora_shapes(BASE)
SPECS = {
    "one": {"rank": 4, "targets": ("q_proj", "down_proj"), "seed": 1},
    "two": {"rank": 9, "targets": ("q_proj", "v_proj"), "rslora": True, "seed": 2},
}


@given(
    st.lists(st.tuples(st.text("0123456789abcdef", min_size=64, max_size=64), st.floats(-16, 16)), min_size=1)
)
def test_the_identity_says_what_it_is_made_of_in_any_order(parts: list[tuple[str, float]]) -> None:
    assert parts_of(mix_id(parts)) == sorted(parts)
    assert mix_id(parts) == mix_id(reversed(parts))
    assert parts_of(parts[0][0]) is None


def test_the_update_is_the_weighted_sum_that_peft_makes(tmp_path: Path) -> None:
    folders = {name: make_adapter_folder(tmp_path / name, BASE, **spec) for name, spec in SPECS.items()}
    adapters = {name: read_adapter(folder, SHAPES) for name, folder in folders.items()}
    model = make_adapter(BASE, **SPECS["one"])
    assert isinstance(model, PeftModel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_adapter(folders["two"], "two")
        model.add_weighted_adapter(["default", "two"], [0.75, -1.5], "mix", combination_type="cat")
    weights = {"one": 0.75, "two": -1.5}
    library = AdapterLibrary(SHAPES, {a.digest: folders[name] for name, a in adapters.items()}, None, 2**20)
    digest = mix_id((adapters[name].digest, weight) for name, weight in weights.items())
    found = library.take(digest, library.read(digest))
    assert found.ranks == {"q": 13, "down": 4, "v": 9}
    for (layer, module), pair in found.pairs.items():
        linear = model.get_submodule(f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}")
        delta = linear.get_delta_weight("mix")
        torch.testing.assert_close((pair.a.T @ pair.b).T * pair.scaling, delta, atol=1e-5, rtol=1e-5)


def test_where_the_host_keeps_adapters_in_another_form_mixes_are_made_of_their_files(tmp_path: Path) -> None:
    folders = {name: make_adapter_folder(tmp_path / name, BASE, **spec) for name, spec in SPECS.items()}
    adapters = {name: read_adapter(folder, SHAPES) for name, folder in folders.items()}
    known = {a.digest: folders[name] for name, a in adapters.items()}
    digest = mix_id((adapters[name].digest, weight) for name, weight in (("one", 0.75), ("two", -1.5)))
    plain = AdapterLibrary(SHAPES, known, None, 2**20)
    truth = plain.take(digest, plain.read(digest))

    def host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    prepare = partial(made_ready, dtype=torch.bfloat16, host=host)
    library = AdapterLibrary(SHAPES, known, None, 2**20, prepare)
    for part in known:
        kept = library.take(part, library.read(part))
        assert all(pair.ready for pair in kept.pairs.values())
    found = library.take(digest, library.read(digest))
    assert all(pair.ready for pair in found.pairs.values())
    for site, pair in truth.pairs.items():
        assert torch.equal(found.pairs[site].a, pair.a.bfloat16())
        assert torch.equal(found.pairs[site].b, pair.b.bfloat16()), "rounded once"


def test_an_adapter_that_is_more_than_low_rank_is_refused(tmp_path: Path) -> None:
    plain = read_adapter(make_adapter_folder(tmp_path / "one", BASE, **SPECS["one"]), SHAPES)
    dora = adapter_of("dora", plain.pairs, dora_bias={(0, "q"): DoraBias(magnitude=torch.ones(32))})
    with pytest.raises(AdapterError, match="'dora' is DoRA and cannot be combined"):
        mixed("mix:x", [(plain, 1.0), (dora, 1.0)])
