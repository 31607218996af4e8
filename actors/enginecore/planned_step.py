"""A step that the scheduler has planned, until the executor begins it."""

from collections.abc import Callable, Mapping
from threading import Lock

from personae.engine.plan import StepPlan
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey

Grammars = Mapping[GrammarKey, Grammar]


class PlannedStep:
    """A plan, with the grammars of its admissions. The scheduler may replace both until the executor, on its
    own thread, has begun the step."""

    def __init__(self, plan: StepPlan, grammars: Grammars) -> None:
        self._plan = plan
        self._grammars = grammars
        self._begun = False
        self._lock = Lock()

    @property
    def plan(self) -> StepPlan:
        """The plan as it is now."""
        return self._plan

    def begin(self) -> tuple[StepPlan, Grammars]:
        """From now on nothing changes. Waits while the plan is being replaced, which takes about as long as
        making it."""
        with self._lock:
            self._begun = True
            return self._plan, self._grammars

    def replace(self, make: Callable[[], tuple[StepPlan, Grammars] | None]) -> StepPlan | None:
        """Replace the plan by the one that `make` returns, unless the step has begun. None: it stays."""
        with self._lock:
            if self._begun or (made := make()) is None:
                return None
            self._plan, self._grammars = made
            return self._plan
