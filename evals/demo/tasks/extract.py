"""Task (c): extract a record from a paragraph into a given JSON Schema."""

from personae.evals.demo.sample import Sample, dumps
from personae.evals.demo.tasks.fields import Field, draw_fields, object_schema, record_of
from personae.evals.demo.values import Values, text_of

SENTENCES = (
    "The {p} is {v}.",
    "{P}: {v}.",
    "As {p} we noted {v}.",
    "We agreed on {v} as the {p}.",
    "It has the {p} {v}.",
    "For the {p}, take {v}.",
)
FILLERS = (
    "Thanks for the quick reply.",
    "This is all that we know so far.",
    "Here is the update about the {noun}.",
    "{person} wrote this down.",
    "The team in {place} sends regards.",
)
PROMPTS = (
    "Extract the record as JSON.\nSchema: {schema}\nText: {text}",
    "Read the text and fill the schema.\nText: {text}\nSchema: {schema}",
    "{text}\nGive me a JSON object for this schema: {schema}",
)


def _sentence(values: Values, field: Field) -> str:
    if field.kind == "boolean":
        return f"It is {'' if field.value else 'not '}{field.words}."
    form = values.rng.choice(SENTENCES)
    return form.format(p=field.words, P=field.words.capitalize(), v=text_of(field.value))


def extraction(values: Values) -> Sample:
    """A paragraph that states every field of the schema, some others, and some chatter."""
    rng = values.rng
    stated = draw_fields(values, rng.choice((1, 2, 2, 3, 3, 4)))
    wanted = [field for field in stated if rng.random() < 0.85] or stated[:1]
    sentences = [_sentence(values, field) for field in stated]
    for _ in range(rng.choice((0, 0, 1, 2))):
        filler = rng.choice(FILLERS)
        sentences.append(filler.format(noun=values.noun(), person=values.person(), place=values.place()))
    rng.shuffle(sentences)
    schema = object_schema(wanted)
    user = rng.choice(PROMPTS).format(schema=dumps(schema), text=" ".join(sentences))
    return Sample(
        task="extract",
        messages=[{"role": "user", "content": user}],
        answer=dumps(record_of(wanted)),
        reasoning=f"Fields: {', '.join(field.name for field in wanted)}.",
        thinking=rng.random() < 0.1,
        schema=schema,
    )
