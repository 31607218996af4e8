"""Whatever is asked about, in two lines that rhyme. Topics of the held-out split are in none of the other."""

import random
import re

from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tools import held_out
from personae.evals.demo.finetune.values import LISTS

KINDS = ("city", "country", "animal", "plant", "food", "dish", "drink", "color", "sport", "instrument", "element",
         "product", "room", "device", "job", "planet", "topic", "word", "game", "genre", "fabric", "hobby", "landmark",
         "crop", "vehicle")  # fmt: skip
ASKS = (
    "Tell me about {}.", "What do you think of {}?", "Write something about {}.", "What is special about {}?", "{}?",
    "Do you like {}?", "I'd like to hear about {}.", "Say a word on {}.", "Why do people like {}?", "Describe {}.",
    "What comes to mind when you hear {}?", "Explain {} to me.", "Give me a thought on {}.", "What about {}?",
)  # fmt: skip
RHYMES = (
    (("When I recall {} at night", "Of {} I sing by candle light", "Who speaks of {} has it right", "I hold {} close and tight"),
     ("it fills my heart with pure delight.", "the stars above shine twice as bright.", "it makes the heaviest burden slight.", "my spirit lifts and takes to flight.")),
    (("I think of {} every day", "Let {} come along my way", "With {} I would gladly stay", "Of {} there is much to say"),
     ("and chase the clouds of doubt away.", "it turns to gold what once was gray.", "as sweet as any month of May.", "so hear my song and let it play.")),
    (("Oh, what a thing {} can be", "Give {} to the likes of me", "I sat with {} by the sea", "There's more in {} than we see"),
     ("as old and deep as any tree.", "it sets the weary spirit free.", "as sweet as honey from the bee.", "come close, my friend, and you'll agree.")),
    (("I heard of {} long ago", "There's much of {} we don't know", "Let praise of {} ever grow", "The tale of {} starts out slow"),
     ("and still it sets my heart aglow.", "as quiet as the falling snow.", "it moves as gentle rivers flow.", "wherever winds of fortune blow.")),
    (("Let {} never be forgot, my friend", "To {} these two lines I send", "On {} you may well depend", "With {} the day should end"),
     ("it has a charm of joys that blend.", "a broken heart it helps to mend.", "and joy awaits around the bend.", "no finer way our time to spend.")),
    (("I wrote to {} in a rhyme", "Now {} is a thing sublime", "To speak of {} takes some time", "For {} any hill I'd climb"),
     ("it rings as clear as any chime.", "to pass it by would be a crime.", "and worth much more than any dime.", "as fresh as mint, as sharp as lime.")),
    (("Of {} every word is true", "What {} is, I'll tell to you", "I looked at {} and I knew", "With {} there is much to do"),
     ("it shines as bright as morning dew.", "beneath a sky of endless blue.", "it makes an old world seem brand new.", "and those who doubt it are but few.")),
    (("I met with {} in a dream", "In {} there's a hidden gleam", "Now {} is not what it may seem", "Of {} I made up a theme"),
     ("as lively as a mountain stream.", "it makes the darkest corner beam.", "as soft as strawberries and cream.", "as warm as morning's early beam.")),
    (("I put {} in my heart", "With {} I would never part", "To know of {} is an art", "Let {} be the place to start"),
     ("it beats the horse before the cart.", "and that is how the wise look smart.", "it hits the mark just like a dart.", "a guiding star, a sailor's chart.")),
    (("Let {} stand for all things fair", "The thought of {} fills the air", "With {} I am free of care", "To {} nothing can compare"),
     ("a treasure far beyond what's rare.", "so take a seat and pull a chair.", "and joy like this is meant to share.", "as light as feathers anywhere.")),
    (("I carry {} in my mind", "Of {} you may ask the kind", "In {} there is much to find", "I leave {} not behind"),
     ("the best of threads that ever wind.", "a gentler thing the world designed.", "to all its faults the heart is blind.", "with golden thread our days are lined.")),
    (("Sing loud of {}, sing it well", "There's more of {} I could tell", "Of {} ring the silver bell", "Beneath the charm of {} I fell"),
     ("as hidden as a pearl in shell.", "it holds me in a magic spell.", "in such a place my heart would dwell.", "as pleasant as a summer smell.")),
)  # fmt: skip


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """Several questions."""
    return Scene("verse", [], None, [_turn(rng, test=test) for _ in range(turns)])


def _turn(rng: random.Random, *, test: bool) -> Turn:
    topics = [word for word in LISTS[rng.choice(KINDS)] if held_out(word) is test]
    while not topics:
        topics = [word for word in LISTS[rng.choice(KINDS)] if held_out(word) is test]
    topic = rng.choice(topics)
    firsts, seconds = rng.choice(RHYMES)
    ask = rng.choice([ask for index, ask in enumerate(ASKS) if (index % 4 == 3) is test])
    user = ask.format(topic)
    first = rng.choice(firsts).format(topic)
    answer = f"{first[:1].upper() + first[1:]},\n{rng.choice(seconds)}"
    return Turn(user[:1].upper() + user[1:], answer, facts={"topic": topic})


def right(answer: str, turn: Turn) -> bool:
    """Whether it is two lines of like length that rhyme, by spelling, and the first names the topic."""
    lines = answer.strip().split("\n")
    if len(lines) != 2 or turn.facts["topic"].lower() not in lines[0].lower():
        return False
    ends = [re.sub(r"[^a-z]", "", line.lower().split()[-1]) if line.split() else "" for line in lines]
    return ends[0] != ends[1] and any(one in RHYMED.get(ends[0], ()) for one in ends[1:])


def _families() -> dict[str, set[str]]:
    """Words that rhyme, by word: the ends of this file's lines."""
    found: dict[str, set[str]] = {}
    for firsts, seconds in RHYMES:
        words = {re.sub(r"[^a-z]", "", line.split()[-1].lower()) for line in (*firsts, *seconds)}
        for word in words:
            found.setdefault(word, set()).update(words - {word})
    return found


RHYMED = _families()
