"""Task (a): choose among offered tools and fill their arguments from the user's words; or call nothing."""

from dataclasses import dataclass

from personae.evals.demo import words
from personae.evals.demo.sample import Call, Sample, Tool, call_text
from personae.evals.demo.tasks import chat
from personae.evals.demo.tasks.fields import Field, draw_fields, mention, object_schema, record_of
from personae.evals.demo.values import Values

NO_TOOL = "I have no tool for that."
OPENERS = (
    "Please {} {} {}",
    "{} {} {}",
    "Can you {} {} {}",
    "I want to {} {} {}",
    "Could you {} {} {}",
    "I need to {} {} {}",
)
ARTICLES = ("a", "the", "my")


@dataclass(frozen=True)
class Action:
    """A tool, and a request that it would serve."""

    name: str
    verb: str
    noun: str
    description: str
    fields: list[Field]

    @property
    def tool(self) -> Tool:
        """The tool as the API takes it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": object_schema(self.fields),
        }
        return {"type": "function", "function": function}

    @property
    def call(self) -> Call:
        """The gold call."""
        return {"name": self.name, "arguments": record_of(self.fields)}

    @property
    def plan(self) -> str:
        """What the model thinks before it calls."""
        return f"{self.name}: {', '.join(record_of(self.fields)) or 'nothing'}"


def draw_action(values: Values, verb: str | None = None, noun: str | None = None) -> Action:
    """A tool of one verb and one noun with one to three parameters."""
    rng = values.rng
    verb = verb or rng.choice(tuple(words.VERBS))
    noun = noun or values.noun()
    # Training sees the rarer spellings more often, so that they are read and not guessed.
    styles = (8, 1, 1) if values.split == "test" else (5, 2, 3)
    spellings = (f"{verb}_{noun}", f"{verb}-{noun}", verb + noun.capitalize())
    name = rng.choices(spellings, styles)[0]
    description = f"{verb.capitalize()} {rng.choice(ARTICLES[:2])} {noun}"
    return Action(
        name, verb, noun, description, draw_fields(values, rng.choice((1, 1, 2, 2, 2, 3)), optional=0.3)
    )


def request(values: Values, action: Action) -> str:
    """The user's words for an action, without a final stop."""
    rng = values.rng
    opener = rng.choice(OPENERS)
    verb = rng.choice(words.VERBS[action.verb])
    if opener.startswith("{}"):
        verb = verb.capitalize()
    said = [field for field in action.fields if field.mentioned]
    rng.shuffle(said)
    phrases = [mention(values, field, action.fields) for field in said]
    glue = rng.choice((", ", ", ", " and "))
    head = opener.format(verb, rng.choice(ARTICLES), action.noun)
    if not phrases:
        return head
    return (
        head
        + rng.choice((" ", ", ", ": "))
        + (", ".join(phrases[:-1]) + glue + phrases[-1] if phrases[1:] else phrases[0])
    )


def draw_actions(values: Values, count: int) -> list[Action]:
    """Distinct tools; some share a noun or a verb with the first one, so that both words must be read."""
    rng = values.rng
    first = draw_action(values)
    actions = {(first.verb, first.noun): first}
    while len(actions) < count:
        kin = rng.random()
        other = draw_action(
            values, verb=first.verb if kin < 0.15 else None, noun=first.noun if 0.15 <= kin < 0.35 else None
        )
        actions.setdefault((other.verb, other.noun), other)
    return list(actions.values())


def _count(values: Values, least: int = 1) -> int:
    return max(least, values.rng.choices(range(1, 7), (30, 28, 20, 10, 7, 5))[0])


def _sample(
    values: Values, task: str, user: str, offered: list[Action], answer: str, reasoning: str
) -> Sample:
    values.rng.shuffle(offered)
    system = [{"role": "system", "content": chat.system(values)}] if values.rng.random() < 0.15 else []
    return Sample(
        task=task,
        messages=[*system, {"role": "user", "content": user}],
        answer=answer,
        reasoning=reasoning,
        tools=[action.tool for action in offered],
        thinking=values.rng.random() < 0.15,
    )


def single(values: Values) -> Sample:
    """One call."""
    actions = draw_actions(values, _count(values))
    chosen = actions[0]
    user = request(values, chosen) + values.rng.choice((".", ".", "", "!"))
    return _sample(values, "tool", user, actions, call_text([chosen.call]), chosen.plan)


def parallel(values: Values) -> Sample:
    """Two calls, in the order in which the user asks."""
    actions = draw_actions(values, _count(values, least=2))
    first, second = actions[:2]
    then = request(values, second)
    joint = values.rng.choice((". Also, ", ". Then ", "; also "))
    user = request(values, first) + joint + then[0].lower() + then[1:] + "."
    user = user.replace(joint + "i ", joint + "I ")
    return _sample(
        values,
        "parallel",
        user,
        actions,
        call_text([first.call, second.call]),
        f"{first.plan}; {second.plan}",
    )


def no_call(values: Values) -> Sample:
    """Tools are offered, none fits: another action is asked for, or it is small talk."""
    actions = draw_actions(values, _count(values) + 1)
    if values.rng.random() < 0.3:
        talk = chat.small_talk(values)
        return _sample(
            values, "no_call", talk.messages[-1]["content"], actions[1:], talk.answer, talk.reasoning
        )
    user = request(values, actions[0]) + "."
    return _sample(values, "no_call", user, actions[1:], NO_TOOL, "No tool fits.")
