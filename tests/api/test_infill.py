"""Fill in the middle: the tokens of `prompt` and `suffix` in each form, and what is refused."""

from collections.abc import Sequence
from typing import Any

import asgi
import pytest
import tiny_tokenizers
from fake_engine import BOS_ID, FakeEngine, byte_tokenizer
from tokenizers import normalizers, processors

from personae.api.app import create_app
from personae.api.infill import Infill, infix_tokens
from personae.engine.tokens import Tokenizer

pytestmark = pytest.mark.anyio

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
# As their makers write them: the model cards, Meta's infilling_prompt_tokens, mistral-common's encode_fim.
FORMS = {
    "qwen": (QWEN, "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
    "starcoder": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        "<fim_prefix>A<fim_suffix>B<fim_middle>",
    ),
    "deepseek": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
    ),
    "codellama": (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>A▁<SUF>B▁<MID>"),
    "codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]B[PREFIX]A"),
    "glm": (
        ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
        "<|code_prefix|>A<|code_suffix|>B<|code_middle|>",
    ),
}


def engine_with(tokens: Sequence[str], bos: bool = False) -> FakeEngine:
    tokenizer = byte_tokenizer(special=tokens)
    if bos:
        tokenizer.backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
        )
    return FakeEngine(tokenizer=tokenizer)


async def ask(engine: FakeEngine, **fields: Any) -> Any:
    async with asgi.client(create_app(engine)) as client:
        return await client.post("/v1/completions", json={"model": "base", "prompt": "A", **fields})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bos", [False, True])
async def test_the_prompt_has_the_form_that_the_model_was_trained_on(name: str, bos: bool) -> None:
    tokens, written = FORMS[name]
    engine = engine_with(tokens, bos)
    answer = await ask(engine, suffix="B")
    assert answer.status_code == 200, answer.text
    expected = engine.tokenizer.encode(written, add_special_tokens=False)
    (log,) = engine.submitted
    assert log.tokens == tuple([BOS_ID] * bos + expected)
    assert answer.json()["usage"]["prompt_tokens"] == len(log.tokens)
    assert answer.json()["choices"][0]["text"] == "Hello, world!"
    await ask(engine, suffix="B", add_special_tokens=False)
    assert engine.submitted[-1].tokens == tuple(expected)


async def test_several_prompts_share_the_suffix_and_may_be_streamed() -> None:
    engine = engine_with(QWEN)
    answer = await ask(engine, prompt=["A", "AA"], suffix="B\n", n=2)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    written = [
        "<|fim_prefix|>A<|fim_suffix|>B\n<|fim_middle|>",
        "<|fim_prefix|>AA<|fim_suffix|>B\n<|fim_middle|>",
    ]
    expected = [tuple(engine.tokenizer.encode(text)) for text in written for _ in range(2)]
    assert [log.tokens for log in engine.submitted] == expected
    assert (await ask(engine, suffix="B", stream=True)).text.endswith("data: [DONE]\n\n")


async def test_an_empty_suffix_is_none() -> None:
    engine = engine_with(QWEN)
    for suffix in ("", None):
        await ask(engine, suffix=suffix)
        assert engine.submitted.pop().tokens == tuple(engine.tokenizer.encode("A"))


async def test_an_answer_ends_where_the_form_ends_unless_the_end_is_ignored() -> None:
    engine = engine_with(QWEN)
    find = engine.tokenizer.backend.token_to_id
    ends = {find("<|fim_pad|>"), find("<|file_sep|>")}
    await ask(engine, suffix="B", stop_token_ids=[5])
    assert set(engine.submitted.pop().params.stop_token_ids) == {5, *ends}
    await ask(engine, suffix="B", ignore_eos=True)
    assert engine.submitted.pop().params.stop_token_ids == ()
    await ask(engine)
    assert engine.submitted.pop().params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "B", "echo": True}, "echo"),
        ({"suffix": "B", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"suffix": "B", "prompt": [1, 2]}, "prompt"),
        ({"suffix": "B", "prompt": [[1, 2]]}, "prompt"),
        ({"suffix": "B", "prompt": []}, "prompt"),
        ({"suffix": ["B"]}, "suffix"),
        ({"suffix": "B" * 10_000}, "suffix"),
        ({"suffix": "B" * 300, "prompt": "A" * 300}, "prompt"),
        ({"suffix": "B", "prompt": ["A", "A" * 10_000]}, "prompt[1]"),
    ],
    ids=str,
)
async def test_what_cannot_be_filled_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    engine = engine_with(QWEN)
    refused = await ask(engine, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize("tokens", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
async def test_a_model_without_all_tokens_of_a_form_refuses_the_suffix(tokens: tuple[str, ...]) -> None:
    engine = engine_with(tokens)
    refused = await ask(engine, suffix="B")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert Infill.of(engine.tokenizer) is None


@pytest.mark.parametrize("text", ["def f():\n    pass", "  two", "\n", "☺☺", ""])
def test_a_suffix_gets_no_blank_of_sentencepieces_in_front(text: str) -> None:
    ours = Tokenizer(tiny_tokenizers.make("llama_fallback"))
    theirs = tiny_tokenizers.make("llama_fallback")
    theirs.normalizer = normalizers.Replace(" ", "▁")  # as transformers' CodeLlamaTokenizer sets it for this
    assert infix_tokens(ours, text) == theirs.encode(text, add_special_tokens=False).ids
    bytes_ = byte_tokenizer()
    assert infix_tokens(bytes_, text) == bytes_.encode(text)
