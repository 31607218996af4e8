"""Which families were compared with transformers in which formats of weights, in checkpoints that the tools
wrote: `compared.json`, which `personae.evals.family_formats` found."""

from importlib.resources import files

import msgspec

EQUAL = "equal"


class ComparedFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One format of weights.

    title, tool: as the guide's table has them. cases: the tiny models that were compared; None means all.
    others: the cases that are not equal, by the reason.
    """

    title: str
    tool: str
    others: dict[str, list[str]]
    cases: list[str] | None = None


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cases: each tiny model's `model_type`, by its name. A family may have several."""

    cases: dict[str, str]
    formats: dict[str, ComparedFormat]

    def cells(self, name: str) -> dict[str, str]:
        """What each case in that format is: `EQUAL`, or why not."""
        form = self.formats[name]
        others = {case: why for why, cases in form.others.items() for case in cases}
        return {case: others.get(case, EQUAL) for case in form.cases or self.cases}

    def of_family(self, model_type: str) -> dict[str, str]:
        """What a family is, by format: `EQUAL` if all its cases are."""
        found: dict[str, str] = {}
        for name in self.formats:
            said = [why for case, why in self.cells(name).items() if self.cases[case] == model_type]
            if said:
                found[name] = next((why for why in said if why != EQUAL), EQUAL)
        return found


def compared() -> Compared:
    """Reads the file."""
    return msgspec.json.decode(files(__package__).joinpath("compared.json").read_bytes(), type=Compared)
