"""Drills: short exercises that are not measured but make the circuits that the tasks need.

Copying comes first: a model that can repeat any run of tokens and look up any key learns the tasks
much sooner.
"""

import datetime

from personae.evals.demo import words
from personae.evals.demo.sample import Sample, dumps
from personae.evals.demo.tasks.fields import draw_fields, mention, record_of
from personae.evals.demo.values import Values, text_of


def repeat(values: Values) -> Sample:
    """Repeat a run of unrelated values."""
    rng = values.rng
    kinds = ("person", "place", "date", "time", "integer", "number", "code", "email", "text")
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
    """Add some days to a date, or tell how many days lie ahead of a weekday."""
    rng = values.rng
    today = values.day()
    name = words.WEEKDAYS[today.weekday()]
    if rng.random() < 0.35:
        target = rng.randrange(7)
        ahead = (target - today.weekday() - 1) % 7 + 1
        user, answer = f"Today is {name}. How many days until {words.WEEKDAYS[target]}?", str(ahead)
    else:
        days = rng.randint(1, 10)
        user = f"Today is {today.isoformat()}. Which date is it in {days} days?"
        answer = (today + datetime.timedelta(days=days)).isoformat()
    return Sample("dates", [{"role": "user", "content": user}], answer)
