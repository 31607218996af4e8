from collections.abc import Callable

import pytest
from template_server import SOURCES, Served


@pytest.fixture
def model() -> Callable[..., Served]:
    """A server for the template of that name; the test is skipped where the templates are missing."""

    def served(name: str, answer: str = "fine") -> Served:
        if name not in SOURCES:
            pytest.skip("there is no shared/data/tokenizers beside this repository")
        return Served(SOURCES[name].read_text(encoding="utf-8"), answer)

    return served
