"""The grammar backends by name. A backend's library is imported when the backend is first asked for."""

from importlib import import_module
from threading import Lock

from personae.grammar.backend import GrammarBackend
from personae.grammar.spec import GrammarKind
from personae.grammar.vocabulary import Vocabulary

_FACTORIES = {
    "llguidance": ("personae.grammar.backends.llguidance", "LLGuidanceBackend"),
    "outlines": ("personae.grammar.backends.outlines", "OutlinesBackend"),
    "xgrammar": ("personae.grammar.backends.xgrammar", "XGrammarBackend"),
}

# The backends that support each kind of spec, in the order in which they are asked. The last one takes
# everything that can be enforced. outlines takes small automata, whose masks it looks up, and refuses the
# rest. xgrammar also supports schemas and has its place in the gate, but accepts none that llguidance does
# not. These backends fill a mask in 20 to 60 µs at 100k ids. llguidance compiles a schema in about 1 ms;
# xgrammar takes 40 ms, or seconds for a long `maxLength`.
BACKENDS_OF_KIND: dict[GrammarKind, tuple[str, ...]] = {
    "json_schema": ("llguidance",),
    "json_object": ("llguidance",),
    "regex": ("outlines", "llguidance"),
    "choice": ("outlines", "llguidance"),
    "lark": ("llguidance",),
    "structure": ("llguidance",),
    "ebnf": ("xgrammar",),
}

# The names that vLLM's users know. A spec that names no backend goes to the first one that accepts it.
BACKENDS: dict[str, str] = {"guidance": "llguidance", "outlines": "outlines", "xgrammar": "xgrammar"}


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """A backend for one tokenizer. It costs time and memory in proportion to the vocabulary, so make one per
    model.

    Raises KeyError for an unknown name.
    """
    module, factory = _FACTORIES[name]
    backend: GrammarBackend = getattr(import_module(module), factory)(vocabulary)
    return backend


class Backends:
    """The backends of one vocabulary, each made when it is first needed. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: dict[str, GrammarBackend] = {}
        self._lock = Lock()

    def get(self, name: str) -> GrammarBackend:
        """The backend of this name. Raises KeyError for an unknown one."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make_backend(name, self._vocabulary)
            return self._made[name]
