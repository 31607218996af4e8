from hypothesis import given, settings
from hypothesis import strategies as st
from kit_actors import Doer, crash, whoami
from virtual_clock import run_virtual

from personae.actors.kit.supervisor import Strategy, Supervisor

NAMES = "abcd"


def restarted(strategy: Strategy, dead: int) -> range:
    """Which children are restarted after one died: the strategies in one line each."""
    return {
        "one_for_one": range(dead, dead + 1),
        "rest_for_one": range(dead, len(NAMES)),
        "one_for_all": range(len(NAMES)),
    }[strategy]


@settings(max_examples=60)
@given(
    strategy=st.sampled_from(("one_for_one", "rest_for_one", "one_for_all")),
    deaths=st.lists(st.integers(0, len(NAMES) - 1), max_size=8),
    backend=st.sampled_from(("asyncio", "trio")),
)
def test_any_sequence_of_deaths_leaves_the_epochs_that_the_strategy_says(
    strategy: Strategy, deaths: list[int], backend: str
) -> None:
    diary: list[str] = []

    async def main() -> None:
        top = Supervisor("top", strategy=strategy, max_restarts=len(deaths), report=lambda incident: None)
        refs = [top.spawn(name, lambda name=name: Doer(name, diary)) for name in NAMES]
        async with top:
            for dead in deaths:
                refs[dead].tell(crash)
                for ref in refs:
                    await ref.ask(whoami)

    run_virtual(main, backend)
    epochs = [1] * len(NAMES)
    for dead in deaths:
        for child in restarted(strategy, dead):
            epochs[child] += 1
    assert [diary.count(f"+{name}") for name in NAMES] == epochs
    assert [diary.count(f"-{name}") for name in NAMES] == epochs
    assert diary[-len(NAMES) :] == [f"-{name}" for name in reversed(NAMES)]
