"""The grammar backends by name. A backend's library is imported when the backend is first asked for."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock

from personae.errors import GrammarError
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

_EXTRAS = {"xgrammar": "xgrammar"}
"""The packages of backends that are not always installed."""

# The names that vLLM's users know. A spec that names no backend goes to the first one that accepts it.
BACKENDS: dict[str, str] = {"guidance": "llguidance", "outlines": "outlines", "xgrammar": "xgrammar"}


@cache
def missing(name: str) -> str | None:
    """The package that a backend needs and that is not installed; None if there is none."""
    package = _EXTRAS.get(name)
    return None if package is None or find_spec(package) is not None else package


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """A backend for one tokenizer. It costs time and memory in proportion to the vocabulary, so make one per
    model.

    Raises KeyError for an unknown name, and GrammarError if the backend's package is not installed.
    """
    if (package := missing(name)) is not None:
        raise GrammarError(f"The backend {name} needs the package {package}, which is not installed.")
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
