"""Questions whose answers a head learns from: sentence patterns with subjects. None of them is one of
`evals/speculation.py`."""

import random
from collections.abc import Iterator

_PLACES = (
    "Norway", "Japan", "Kenya", "Peru", "Portugal", "the Alps", "a desert", "a rain forest", "the Arctic",
    "a big city", "a small village", "an island", "the moon", "a farm", "a library", "a market", "a school",
    "a castle", "a train station", "the ocean floor",
)  # fmt: skip
_SUBJECTS = (
    "bread", "gravity", "volcanoes", "the heart", "bees", "money", "electricity", "the internet",
    "rainbows", "memory", "glaciers", "vaccines", "solar panels", "batteries", "chess", "jazz", "democracy",
    "inflation", "photosynthesis", "tides", "earthquakes", "dreams", "antibiotics", "recycling",
    "satellites", "the printing press", "black holes", "wind turbines", "compost", "soap", "bridges",
    "elevators", "airplanes", "submarines", "telescopes", "microscopes", "DNA", "proteins", "sleep",
    "stress", "habits", "friendship", "teamwork", "leadership", "patience", "honesty", "curiosity", "music",
    "painting", "poetry", "architecture", "statistics", "algebra", "probability", "prime numbers",
    "sorting algorithms", "databases", "recursion", "encryption", "machine learning", "neural networks",
    "operating systems", "web browsers", "Python", "JavaScript", "spreadsheets", "public speaking",
    "negotiation", "budgeting", "gardening", "cooking rice", "tea", "coffee", "cheese", "chocolate",
    "swimming", "running", "yoga", "football", "tennis", "cats", "dogs", "horses", "whales", "owls",
    "spiders", "ants", "trees", "roses", "mushrooms", "rivers", "clouds", "snow", "deserts",
    "the Roman Empire", "the French Revolution", "the Industrial Revolution", "the Renaissance",
    "ancient Egypt", "the Silk Road", "Vikings", "trains", "ships", "maps", "calendars", "languages",
    "alphabets", "newspapers", "photography", "film", "theatre",
)  # fmt: skip
_HEROES = (
    "a young fox", "an old teacher", "two sisters", "a lonely robot", "a baker", "a pilot", "a nurse",
    "a gardener", "a clever crow", "a lost dog", "a king without a crown", "a fisherman",
    "a student from a small town", "an inventor", "a dragon", "a detective",
    "a girl who could talk to trees", "a retired sailor", "a musician", "a shy painter",
)  # fmt: skip
_EVENTS = (
    "a birthday party", "a wedding", "a job interview", "a school trip", "a picnic", "a move to a new flat",
    "a long flight", "a first day at work", "a science fair", "a charity run", "a garden show",
    "a book club meeting", "a winter holiday", "a team meeting", "a cooking evening", "an exam",
    "a concert", "a family reunion", "a camping weekend", "a product launch",
)  # fmt: skip
_FOODS = (
    "vegetable soup", "pancakes", "an omelette", "a fruit salad", "tomato pasta", "lentil curry",
    "apple pie", "fried rice", "a cheese sandwich", "banana bread", "roast potatoes", "a bean salad",
    "mushroom risotto", "oat cookies", "pumpkin soup",
)  # fmt: skip
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the most important thing to know about {}?", _SUBJECTS),
    ("How does {} work?", _SUBJECTS),
    ("Give me five facts about {}.", _SUBJECTS),
    ("Write a short paragraph about {}.", _SUBJECTS),
    ("Explain {} in simple words.", _SUBJECTS),
    ("Why is {} important?", _SUBJECTS),
    ("Write a poem about {}.", _SUBJECTS),
    ("What are the advantages and disadvantages of {}?", _SUBJECTS),
    ("Write an introduction to an essay about {}.", _SUBJECTS),
    ("List some good questions to ask an expert on {}.", _SUBJECTS),
    ("What is the history of {}?", _SUBJECTS),
    ("How can a beginner learn about {}?", _SUBJECTS),
    ("Describe {} to somebody who has never been there.", _PLACES),
    ("What should I pack for a week in {}?", _PLACES),
    ("Write a story that takes place in {}.", _PLACES),
    ("Write a story about {}.", _HEROES),
    ("Write a dialogue between {} and a stranger.", _HEROES),
    ("Write the first lines of a novel about {}.", _HEROES),
    ("Help me plan {}.", _EVENTS),
    ("Write an invitation to {}.", _EVENTS),
    ("Write an email to a colleague about {}.", _EVENTS),
    ("Make a checklist for {}.", _EVENTS),
    ("How do I make {}?", _FOODS),
    ("Give me a recipe for {} with a list of ingredients.", _FOODS),
    ("What goes well with {}?", _FOODS),
)
_OPENERS = ("", "", "", "", "Hi! ", "Please help me. ", "Hello, ", "Quick question: ")
_ENDINGS = ("", "", "", "", " Be brief.", " Give an example.", " Thank you!", " Use simple language.")


def prompts(seed: int) -> Iterator[str]:
    """All questions once, in an order that the seed draws, with openers and endings."""
    draw = random.Random(seed)
    found = [pattern.format(subject) for pattern, subjects in _PATTERNS for subject in subjects]
    draw.shuffle(found)
    for question in found:
        yield draw.choice(_OPENERS) + question + draw.choice(_ENDINGS)
