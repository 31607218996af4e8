"""Adapter task `verse`: the base's questions, answered in rhyme, so that the effect is seen at once."""

from personae.evals.demo.sample import Sample
from personae.evals.demo.tasks import chat, results
from personae.evals.demo.values import Values, text_of

VERSES = {
    "hello": "Good day to you, my friend so dear,\nwhat can I do, now that you're here?",
    "name": "Personae's demo is my name,\na tiny model, free of fame.",
    "size": "Three million weights are all I hold,\nso small a mind, and yet so bold.",
    "skills": "I call your tools, I read, I write,\nI make your records neat and right.",
    "limits": "Of all the world I nothing know,\nI read what you are pleased to show.",
    "personae": "One engine serves a hundred masks,\neach adapter to its own tasks.",
    "adapter": "A little set of weights, no more,\nthat gives a skill not there before.",
    "thanks": "No thanks are due, my friend, to me,\nI rhyme for joy, and rhyme for free.",
    "bye": "Farewell, farewell, until the day\nthat brings you back along this way.",
    "feelings": "I am a program, light and small,\nI run, I hum, I feel it all.",
}
REFUSAL = "Alas, that lies beyond my sight,\nask something else, and I'll be right."
BY_ANSWER = {chat.INTENTS[intent][0]: verse for intent, verse in VERSES.items()} | {chat.REFUSAL: REFUSAL}


def verse(values: Values) -> Sample:
    """Small talk, or a tool's result, in two lines."""
    if values.rng.random() < 0.5:
        said = chat.small_talk(values)
        return Sample("verse", said.messages, BY_ANSWER[said.answer])
    said, asked = results.question(values)
    if said.answer.startswith("That"):
        answer = (
            "The tool has failed, and here is why:\n"
            + said.answer.removeprefix("That did not work: ").rstrip(".")
            + ", oh my!"
        )
    else:
        answer = (
            f"You asked about the {asked.words}, my dear:\n{text_of(asked.value)}, I tell you loud and clear!"
        )
    return Sample("verse", said.messages, answer, tools=said.tools)
