import pytest
from byte_bpe import byte_level_vocabulary

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec


def spec(name: str) -> GrammarSpec:
    return GrammarSpec("json_schema", f'{{"type":"object","properties":{{"{name}":{{"type":"string"}}}}}}')


def test_an_equal_spec_finds_the_compiled_grammar():
    compiler = GrammarCompiler(byte_level_vocabulary())
    grammar = compiler.compile(spec("a"))
    assert compiler.get(spec("a")) is None
    compiler.put(spec("a"), grammar)
    assert compiler.get(spec("a")) is grammar
    assert compiler.get(spec("b")) is None
    assert compiler.cached_bytes == grammar.nbytes > 0


def test_the_least_recently_used_grammar_leaves_when_the_bytes_are_over():
    one = GrammarCompiler(byte_level_vocabulary()).compile(spec("a")).nbytes
    compiler = GrammarCompiler(byte_level_vocabulary(), cache_bytes=2 * one)
    for name in "ab":
        compiler.put(spec(name), compiler.compile(spec(name)))
    compiler.get(spec("a"))
    compiler.put(spec("c"), compiler.compile(spec("c")))
    assert compiler.get(spec("b")) is None
    assert compiler.get(spec("a")) is not None
    assert compiler.get(spec("c")) is not None
    assert compiler.cached_bytes <= 2 * one


def test_a_grammar_larger_than_the_whole_cache_evicts_nothing():
    small = GrammarCompiler(byte_level_vocabulary()).compile(spec("a"))
    compiler = GrammarCompiler(byte_level_vocabulary(), cache_bytes=small.nbytes)
    compiler.put(spec("a"), small)
    names = ",".join(f'"{name}":{{"type":"integer"}}' for name in "abcdefgh")
    large = GrammarSpec("json_schema", f'{{"type":"object","properties":{{{names}}}}}')
    compiler.put(large, compiler.compile(large))
    assert compiler.get(large) is None
    assert compiler.get(spec("a")) is small


def test_putting_a_spec_twice_counts_its_bytes_once():
    compiler = GrammarCompiler(byte_level_vocabulary())
    grammar = compiler.compile(spec("a"))
    compiler.put(spec("a"), grammar)
    compiler.put(spec("a"), compiler.compile(spec("a")))
    assert compiler.get(spec("a")) is grammar
    assert compiler.cached_bytes == grammar.nbytes


def test_a_spec_that_cannot_be_enforced_is_refused():
    with pytest.raises(GrammarError):
        GrammarCompiler(byte_level_vocabulary()).compile(GrammarSpec("json_schema", "[]"))
