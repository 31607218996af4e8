"""The Triton kernels' machine code without a GPU: `python -m personae.evals.kernels`.

Each case is compiled for Ampere or Hopper and run by the PTX interpreter of the tests (tests/support/ptx),
which checks bounds, races, waits and fences, and compared with the reference. A case takes a CPU seconds.

    --seconds 3600    random cases until the time is up
    --mutations       changes the machine code, one instruction at a time: how often do the cases notice?
                      With --log FILE, a second call goes on where the first one ended.
    --costs           writes the table of instructions and bytes anew that `make test` compares with
"""

import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
CAPABILITIES = (80, 90)


def support(name: str) -> Any:
    """A module of the tests' support, which is not in the wheel."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
    return importlib.import_module(name)


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the first case, or of the choice of mutations.")] = 0,
    kind: Annotated[str, typer.Option(help="Of the cases; empty: all.")] = "",
    mutations: Annotated[bool, typer.Option("--mutations", help="The table of mutations.")] = False,
    places: Annotated[int, typer.Option(help="Mutations of a class in a kernel, at most.")] = 4,
    log: Annotated[Path | None, typer.Option(help="Mutations: what is in the log is not made again.")] = None,
    costs: Annotated[bool, typer.Option("--costs", help="Write the table of costs.")] = False,
) -> None:
    """Prints what is wrong, and ends with 1 if anything is."""
    if costs:
        support("ptx.costs").write()
    elif mutations:
        raise typer.Exit(mutate(seed, kind, places, log))
    else:
        raise typer.Exit(fuzz(seconds, seed, kind))


def fuzz(seconds: float, seed: int, kind: str) -> int:
    """Random cases; 1 if one of them fails."""
    cases, interpreter = support("ptx.fuzz"), support("ptx")
    kinds = [kind] if kind else list(cases.KINDS)
    until, count, bad = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        number, capability = seed + count // (2 * len(kinds)), CAPABILITIES[count % 2]
        case = cases.case(kinds[count // 2 % len(kinds)], number, capability)
        count += 1
        try:
            with interpreter.Interpreted(capability):
                wrong = [check.error() for check in case.run() if check.failed()]
        except interpreter.Fault as fault:
            wrong = [str(fault)]
        if wrong:
            bad += 1
            print(f"sm_{capability}: {case.text}: {wrong}", flush=True)
    print(f"{count} cases, {bad} wrong")
    return int(bad > 0)


def mutate(seed: int, kind: str, places: int, log: Path | None) -> int:
    """Samples of all classes in all kernels; 1 if one is neither noticed nor harmless for a known reason.
    After an interrupt (Ctrl-C) the table has what was found so far. The log has a line of JSON for each."""
    known = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    found = {entry["change"]: entry for entry in known}
    with suppress(KeyboardInterrupt):
        for entry in _survey(seed, kind, places, set(found)):
            found[entry["change"]] = entry
            if entry["outcome"] == "unexplained":
                print(f"{entry['change']}, {entry['source']}: {entry['text']}", flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    _print_table(list(found.values()), list(support("ptx.mutations").GROUPS))
    return int(any(entry["outcome"] == "unexplained" for entry in found.values()))


def _survey(seed: int, kind: str, places: int, known: set[str]) -> Iterator[dict[str, Any]]:
    """What became of each change that is not known yet."""
    contract, changes, reasons = (support(f"ptx.{name}") for name in ("contract", "mutations", "reasons"))
    for name, makers in contract.CONTRACT.items():
        for capability in CAPABILITIES if kind in ("", name) else ():
            for subject in changes.subjects([make(capability) for make in makers], capability):
                digest = sha256(subject.ptx.encode()).hexdigest()[:8]
                for mutant in changes.sample(list(changes.mutants(subject.prepared)), places, seed):
                    where = f"sm_{capability}, {name}, {subject.kernel} {digest}:{mutant.at}"
                    change = f"{where} {mutant.group} {mutant.kind}"
                    if change in known:
                        continue
                    outcome, reason = _outcome(changes, reasons, subject, mutant)
                    line = subject.prepared.code.lines[mutant.at]
                    yield {
                        "change": change,
                        "group": mutant.group,
                        "target": f"sm_{capability}",
                        "outcome": outcome,
                        "reason": reason,
                        "source": line.source,
                        "text": " ".join(line.text.split()),
                    }


def _outcome(changes: Any, reasons: Any, subject: Any, mutant: Any) -> tuple[str, str]:
    """How it ended, and, of a change that changes nothing, why."""
    noticed = changes.noticed(subject, mutant)
    if noticed is None:
        return "not reached", ""
    if noticed:
        return "noticed", ""
    reason = reasons.explain(subject, mutant)
    return ("harmless", reason) if reason else ("unexplained", "")


def _print_table(entries: list[dict[str, Any]], groups: list[str]) -> None:
    """One row a class; and the reasons."""
    found = Counter((entry["group"], entry["target"], entry["outcome"]) for entry in entries)
    why = Counter((entry["group"], entry["reason"]) for entry in entries if entry["reason"])
    print("| change | target | made | noticed | harmless | unexplained | of the harmful |")
    print("|---|---|---|---|---|---|---|")
    for group in groups:
        for target in sorted({entry["target"] for entry in entries}):
            noticed, harmless, missed = (
                found[group, target, outcome] for outcome in ("noticed", "harmless", "unexplained")
            )
            made = noticed + harmless + missed
            if made:
                share = f"{noticed / (noticed + missed):.0%}" if noticed + missed else "-"
                print(f"| {group} | {target} | {made} | {noticed} | {harmless} | {missed} | {share} |")
    print("\n| change | why it changes nothing | how often |\n|---|---|---|")
    for (group, reason), count in sorted(why.items()):
        print(f"| {group} | {reason} | {count} |")


if __name__ == "__main__":
    typer.run(main)
