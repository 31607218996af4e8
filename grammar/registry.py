"""The grammar backends by name. A backend's library is imported when the backend is first asked for."""

from importlib import import_module

from personae.grammar.backend import GrammarBackend
from personae.grammar.vocabulary import Vocabulary

_FACTORIES = {
    "xgrammar": ("personae.grammar.backends.xgrammar", "XGrammarBackend"),
}


def backend_names() -> tuple[str, ...]:
    """The names of the backends, fastest first."""
    return tuple(_FACTORIES)


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """A backend for one tokenizer. Costs time and memory with the vocabulary's size: make one per model.

    Raises KeyError for an unknown name.
    """
    module, factory = _FACTORIES[name]
    backend: GrammarBackend = getattr(import_module(module), factory)(vocabulary)
    return backend
