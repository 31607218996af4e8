"""GBNF is read as llama.cpp reads it: what it matches, and what is refused."""

import pytest

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import BoundGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.gbnf import GbnfError, read_gbnf
from personae.grammar.spec import GrammarSpec

END = 256
VOCABULARY = byte_vocabulary()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, sandboxed=False)


def matches(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in (*text.encode(), END))


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        ("root ::= .", ["x", "é", "\n", "😀", '"'], ["", "xy"]),
        ('root ::= "x" .*', ["x", "xy\nz"], ["y", ""]),
        ('root ::= "a" | ', ["a", ""], ["b"]),
        ('root ::= ("a" | )', ["a", ""], ["b"]),
        ('root ::= ( | "a") "b"', ["ab", "b"], ["a"]),
        ("root ::=", [""], ["a"]),
        ('root ::= "a" (\n "b"\n | "c" # or\n)\n\n', ["ab", "ac"], ["a"]),
        ('root ::= "a" |\n "b"', ["a", "b"], ["ab"]),
        ('root ::= "a"\n  | "b" # or\n  # or\n  | "c"\nother ::= "d"', ["a", "b", "c"], ["d"]),
        ('root ::=\r\n  x-1\r\nx-1 ::= "b"', ["b"], ["x"]),
        ('root ::= 1st\n1st ::= "b"+ | rule-1st\nrule-1st ::= "c"', ["b", "bb", "c"], [""]),
        ('root ::= "ab"{2} [0-9]{1,2} "c"{0,}', ["abab1", "abab12cc"], ["ab1", "abab123"]),
        ('root ::= "a"{0,1}{2}', ["", "a", "aa"], ["aaa"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\\\"" [\]\[]', ['Aé😀\t\\"]', 'Aé😀\t\\"['], ['Aé😀\t\\"']),
        (r"root ::= [^\n-]+ [a-]", ["xa", "x-"], ["\na", "-a"]),
        (r"root ::= [a^] [\^\-]", ["a^", "^-"], ["b-"]),
        ("root ::= [^]", ["x"], [""]),
        ("root ::= [é-ü]", ["ö"], ["a"]),
        ("root ::= item.\nitem ::= [a-c]", ["ax", "b."], ["a"]),
    ],
)
def test_what_a_grammar_matches(
    compiler: GrammarCompiler, source: str, texts: list[str], others: list[str]
) -> None:
    grammar = compiler.compile_here(GrammarSpec("ebnf", source))
    assert [text for text in texts if not matches(grammar, text)] == []
    assert [text for text in others if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('root ::= "a"\n"b"', "line 2, column 1: expected the name of a rule"),
        (r"root ::= [\d]", r"line 1, column 12: the escape \\d is unknown"),
        ("root ::= (", "expected '\\)'"),
        ('root ::= "a', "expected '\"'"),
        ("root ::= [a", "expected ']'"),
        ("root ::= []", "expected a character"),
        ("root ::= [z-a]", "comes before the first"),
        ("root ::= *", "expected something to repeat"),
        ('root ::= "a"{2,1}', "less than the first"),
        ('root ::= "a"{x}', "expected {m}"),
        ('root ::= "a" )', "expected a new line"),
        (r'root ::= "\x4"', "hexadecimal digits"),
        (r'root ::= "\ud83d"', "no character"),
        ("root ::= <think>", "expected a new line, at '<think>'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root ::= missing", "the rule 'missing' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= " + "(" * 2000, "too many parentheses"),
        ("root", "expected '::=' after 'root'"),
    ],
)
def test_what_is_refused_and_where(compiler: GrammarCompiler, source: str, why: str) -> None:
    with pytest.raises(GbnfError, match=why):
        read_gbnf(source)
    with pytest.raises(GrammarError, match="read as GBNF, cannot be compiled") as refused:
        compiler.compile_here(GrammarSpec("ebnf", source))
    assert refused.value.param == "structured_outputs.grammar"


# the published grammars of llama.cpp, in grammars/ of its repository, in short
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
LIST = """
root ::= item+

# Excludes various line break characters
item ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"
"""
CHESS = """
root   ::= (
    # it must start with the characters "1. " followed by a sequence
    "1. " move " " move "\\n"
    ([1-9] [0-9]? ". " move " " move "\\n")+
)
move   ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ARITHMETIC, "(a +12)*b = 3\n"),
        (LIST, "- one\n- two é\n"),
        (CHESS, "1. e4 e5\n2. Nf3 O-O\n"),
    ],
)
def test_grammars_as_llama_cpp_publishes_them(compiler: GrammarCompiler, source: str, text: str) -> None:
    assert matches(compiler.compile_here(GrammarSpec("ebnf", source)), text)
    assert not matches(compiler.compile_here(GrammarSpec("ebnf", source)), text[:-1])
