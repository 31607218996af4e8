"""The examples of docs/guide/tools.md run with a model that calls and reasons."""

import re
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from tool_chat import TAGS, TEMPLATE, call

from personae.api.app import create_app
from personae.engine.sequence import SequenceLog
from personae.grammar.reasoning.registry import NAMES as REASONING_FORMATS
from personae.grammar.tools.registry import NAMES as TOOL_FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "tools.md").read_text()


def test_the_examples_run() -> None:
    tokenizer = byte_tokenizer(TEMPLATE, TAGS)

    def answer(log: SequenceLog) -> str:
        prompt = tokenizer.decode(log.tokens, skip_special_tokens=False)
        if prompt.rstrip().endswith("<think>"):
            return "It rains, often.\n</think>\n\nProbably rain."
        if "set_date" in prompt:
            return call("set_date", input="2026-11-21")
        return "Rain." if "12 °C" in prompt else call("get_weather", city="Cologne")

    engine = FakeEngine(answer, tokenizer=tokenizer, max_model_len=4096)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    with serving(create_app(engine)) as address:
        names: dict[str, Any] = {}
        for block in blocks:
            exec(block.replace("http://127.0.0.1:8000", address).replace('"tools"', '"base"'), names)
        names["client"].close()


def test_the_page_lists_every_format() -> None:
    assert all(f"`{name}`" in PAGE for name in (*TOOL_FORMATS, *REASONING_FORMATS))
