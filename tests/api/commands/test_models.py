"""`personae models` lists what can be served."""

import json

from tiny_models import FAMILIES as COMPARED
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.commands.models import supported
from personae.engine.models import FAMILIES, MODEL_TYPES, WHOLE


def test_every_architecture_is_listed_once() -> None:
    assert sorted(each.architecture for each in supported().families) == sorted(FAMILIES)


def test_those_compared_in_every_dtype_are_those_that_the_tests_compare() -> None:
    assert {MODEL_TYPES[kind] for kind in WHOLE} == {
        name for shape in COMPARED.values() for name in shape["architectures"]
    } | {"Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"}  # the same decoders


def test_the_json_has_what_the_table_has() -> None:
    shown = CliRunner().invoke(app, ["models"]).output
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).output)
    for family in found["families"]:
        assert family["architecture"] in shown
    for name in (*found["gguf"], *found["quantize"], *found["quant_methods"]):
        assert name in shown
    assert {"Q4_K", "Q8_0"} <= {*found["gguf_kept"]} < {*found["gguf"]}


def test_a_family_says_what_it_was_in_each_format_that_a_tool_wrote() -> None:
    found = {family.architecture: family.formats for family in supported().families}
    assert found["Qwen3ForCausalLM"]["GPTQ"] == "equal"
    assert found["NemotronHForCausalLM"]["W4A16"] == "refused"  # one of its cases
    assert found["Gemma3ForCausalLM"]["AWQ"] == "the tool fails"
    assert "GGUF Q8_0" not in found["LlamaForCausalLM"]  # no such file was compared
    left = {architecture for architecture, formats in found.items() if not formats}
    assert left == {"MiMoForCausalLM", "Mistral3ForConditionalGeneration"}  # decoders of other families
