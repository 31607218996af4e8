"""Drills: short exercises that are not measured but make the circuits that the tasks need.

Copying comes first: a model that can repeat any run of tokens and look up any key learns the tasks
much sooner.
"""

import datetime

from personae.evals.demo.sample import Sample, dumps
from personae.evals.demo.tasks.fields import draw_fields, mention, record_of
from personae.evals.demo.values import Values, text_of
from personae.evals.demo.words import WEEKDAYS


def counted(today: datetime.date, days: int) -> str:
    """The days from today on, as one counts them on a calendar: `0 Mon 11-30, 1 Tue 12-01`.

    Each entry follows from the one before, which a small model learns; sums of dates it does not.
    """
    dates = (today + datetime.timedelta(days=ahead) for ahead in range(days + 1))
    return ", ".join(
        f"{ahead} {WEEKDAYS[date.weekday()][:3]} {date.isoformat()[5:]}" for ahead, date in enumerate(dates)
    )


def repeat(values: Values) -> Sample:
    """Repeat a run of unrelated values."""
    rng = values.rng
    kinds = ("person", "place", "date", "time", "integer", "number", "code", "email", "text", "word", "word")
    said = rng.choice((", ", " ", "; ")).join(
        text_of(values.of_kind(rng.choice(kinds))) for _ in range(rng.randint(2, 9))
    )
    return Sample("repeat", [{"role": "user", "content": f"Repeat: {said}"}], said)


def lookup(values: Values) -> Sample:
    """Give the values of some keys as JSON, in the order asked."""
    rng = values.rng
    fields = draw_fields(values, rng.randint(2, 6))
    shown = [mention(values, field, fields) for field in fields]
    asked = rng.sample(fields, rng.randint(1, len(fields)))
    rng.shuffle(shown)
    user = f"{', '.join(shown)}.\nJSON with {', '.join(field.name for field in asked)}"
    return Sample("lookup", [{"role": "user", "content": user}], dumps(record_of(asked)))


def dates(values: Values) -> Sample:
    """Count days from a date, up to a number or a weekday."""
    today, rng = values.day(), values.rng
    days = rng.randint(1, 10)
    until = f"{days} days" if rng.random() < 0.5 else f"until {WEEKDAYS[(today.weekday() + days) % 7]}"
    if until.startswith("until"):
        days = (days - 1) % 7 + 1
    user = f"Today is {WEEKDAYS[today.weekday()]} {today.isoformat()}. Count {until}."
    last = today + datetime.timedelta(days=days)
    return Sample("dates", [{"role": "user", "content": user}], f"{counted(today, days)}: {last.isoformat()}")
