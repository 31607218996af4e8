"""The promise as a whole: what is taken under strict is valid, whatever the schema and whatever the model."""

import contextlib
import json
import random

import jsonschema
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import Unfinished, spell, walk
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from json_schemas import VALUES, schemas
from sandbox_limits import PATIENT

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = byte_level_vocabulary()


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    yield compiler
    compiler.close()


def compiled(compiler, schema):
    for checked in (False, True):
        with contextlib.suppress(GrammarError):
            return compiler.compile_here(GrammarSpec("json_schema", json.dumps(schema), checked=checked))
    return assume(False)


def test_whatever_a_model_chooses_the_answer_is_valid(compiler):
    finished = []

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(schema=schemas(), seed=st.integers(0, 2**16))
    def play(schema, seed):
        grammar = compiled(compiler, schema)
        validator = jsonschema.Draft202012Validator(schema)
        for offset in range(3):
            with contextlib.suppress(Unfinished):
                text = walk(grammar.matcher(), VOCABULARY, random.Random(seed + offset), budget=15)
                validator.validate(json.loads(text))
                finished.append(text)

    play()
    assert len(finished) > 100


def test_no_invalid_instance_is_accepted(compiler):
    accepted = []

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(schema=schemas(), instances=st.lists(VALUES, min_size=4, max_size=8))
    def play(schema, instances):
        grammar = compiled(compiler, schema)
        validator = jsonschema.Draft202012Validator(schema)
        for instance in instances:
            matcher = grammar.matcher()
            text = json.dumps(instance, ensure_ascii=False).encode()
            if all(matcher.accept(token) for token in spell(text, VOCABULARY)) and matcher.accept(0):
                validator.validate(instance)
                accepted.append(text)

    play()
    assert len(accepted) > 100
