"""A start waits for neither the tokenizer nor the vocabulary, and whoever needs one of them waits for it."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from byte_bpe import byte_fallback_json, byte_level_tokenizer

from personae.actors import compiler_builder
from personae.actors.compiler_builder import CompilerBuilder
from personae.actors.model_texts import ModelTexts
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import ModelLoadError
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary, check_vocabulary


class CountingCheckpoint:
    """A checkpoint of which only the tokenizer is read, slowly."""

    def __init__(self) -> None:
        self.reads = 0

    def tokenizer_files(self) -> TokenizerFiles:
        self.reads += 1
        time.sleep(0.05)
        return TokenizerFiles(byte_level_tokenizer(), None, None, (0,), {}, {})


def test_texts_are_read_when_they_are_first_asked_for_and_once() -> None:
    checkpoint: Any = CountingCheckpoint()
    texts = ModelTexts(checkpoint, 350)
    assert texts.spaceless() is None
    assert checkpoint.reads == 0
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(each) for each in (texts.vocabulary, texts.retokenizer, texts.tokenizer) * 4]
        assert len({id(one.result()) for one in found}) == 3
    assert checkpoint.reads == 1
    assert texts.spaceless() is texts.retokenizer().spaceless
    assert texts.vocabulary().tokens == texts.retokenizer()._tokens


def test_the_compiler_begins_when_a_grammar_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_builder, "PATIENCE_SECONDS", 600.0)
    texts = ModelTexts(CountingCheckpoint(), 350)  # type: ignore[arg-type]  # all that is read of one
    service = CompilerBuilder(texts.vocabulary, warm=False).build()
    spec = GrammarSpec("choice", json.dumps(["yes", "no"]))
    assert service.get(spec, "") is None
    assert texts.spaceless() is None
    grammar = service.compile(spec, "")
    assert texts.spaceless() is not None
    assert grammar.begin(9, ()) is not None
    service.put(spec, grammar, "")
    assert service.get(spec, "") is grammar


@pytest.mark.parametrize("most", [600.0, 0.3])
def test_without_a_grammar_the_compiler_begins_when_the_process_is_idle(
    monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    monkeypatch.setattr(compiler_builder, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(compiler_builder, "MOST_SECONDS", most)
    used, busy = 0.0, True

    def process_time() -> float:
        nonlocal used
        used += 0.05 if busy else 0.0
        return used

    monkeypatch.setattr(compiler_builder, "process_time", process_time)
    asked = Event()

    def vocabulary() -> Vocabulary:
        asked.set()
        raise ModelLoadError("its files have gone")

    service = CompilerBuilder(vocabulary, warm=False).build()
    if most == 600.0:
        assert not asked.wait(0.5)
        busy = False
    assert asked.wait(60)
    with pytest.raises(ModelLoadError, match="have gone"):
        service.compile(GrammarSpec("choice", "[]"), "")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "ByteFallback"}])
@pytest.mark.parametrize("stops", [(2,), (400,), ()])
def test_the_frontend_refuses_what_the_vocabulary_would(
    decoder: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    document = json.loads(byte_fallback_json()) | {"decoder": decoder}

    def refusal(made: Any, *arguments: Any) -> str | None:
        try:
            made(*arguments, 265, stops)
        except ModelLoadError as error:
            return error.message
        return None

    expected = refusal(Vocabulary.from_tokenizer_json, json.dumps(document))
    assert refusal(check_vocabulary, decoder) == expected
    assert (expected is None) == (stops == (2,) and decoder == {"type": "ByteFallback"})


def test_serve_starts_its_engine_before_it_imports_a_package_that_takes_long() -> None:
    program = (
        "import os, sys\n"
        "from personae.actors import spawn\n"
        "def spy(command, environment=None):\n"
        "    print(*sys.modules, flush=True)\n"
        "    os._exit(0)\n"
        "spawn.spawn = spy\n"
        "sys.argv = ['personae', 'serve']\n"
        "from personae.__main__ import main\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    there = set(shown.stdout.split())
    assert "personae.actors.spawn" in there
    assert not there & {"anyio", "asyncio", "jinja2", "numpy", "starlette", "torch", "typer", "uvicorn"}
