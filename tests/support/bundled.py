"""The bundled model as a fixture, with two grammars that force much of their text."""

import json
from functools import cache
from typing import Any

from engine_harness import EngineHarness

from personae.engine.speculation.forced import Retokenizer
from personae.engine.tokens import Tokenizer
from personae.evals.demo.adapters import MODEL
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "delivery_address": {"type": "string", "maxLength": 12},
        "reason_of_return": {"enum": ["arrived too late", "arrived broken", "not wanted any more"]},
        "refund_by_bank_transfer": {"type": "boolean"},
    },
    "required": ["delivery_address", "reason_of_return", "refund_by_bank_transfer"],
    "additionalProperties": False,
}
OBJECT = GrammarSpec("json_schema", json.dumps(SCHEMA))
LONG = (
    "No refund is given for a parcel that was opened, used, worn or washed, or that comes back to us later "
    "than thirty days after the day on which it was delivered."
)
CHOICE = GrammarSpec("choice", json.dumps([LONG, "Yes, there is a refund."]))
PROMPT = (5, 6, 7)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@cache
def vocabulary() -> Vocabulary:
    text = (MODEL / "tokenizer.json").read_bytes()
    return Vocabulary.from_tokenizer_json(text, tokenizer().vocab_size, tokenizer().eos_ids)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary(), sandboxed=False)


def harness(*, runs_ahead: bool = False, **sizes: Any) -> EngineHarness:
    made = EngineHarness(MODEL, spelling=Retokenizer(tokenizer(), vocabulary().tokens), **sizes)
    made.engine.runs_ahead = runs_ahead
    made.grammars |= {spec: compiler().compile(spec) for spec in (OBJECT, CHOICE)}
    return made
