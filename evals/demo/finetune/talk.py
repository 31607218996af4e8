"""What people say around a question, and questions that need no tool."""

OPENERS = (
    "Hi!", "Hello.", "Please help me.", "Quick question:", "Hey,", "Good morning.", "I need your help.",
    "Can you help me with this?", "One more thing:", "Could you do this for me?", "Right,", "OK.",
)  # fmt: skip
NOISE = (
    "I have been busy all week.", "My friend asked me to find this out.", "We are planning something new.",
    "I'm working on a report.", "My boss wants to know this today.", "I'm a student and this is my homework.",
    "This is for a trip with the family.", "I just moved here.", "It has been a long day.",
    "I'm writing an article for a magazine.", "My daughter asked me about this.",
)  # fmt: skip
THANKS = ("Thanks!", "Thank you.", "Thanks a lot in advance.", "Please be quick.", "That would be great.")
NOTHING_FITS = (
    "None of my tools can do that.", "I have no tool for that.", "I can't do that with the tools that I have.",
    "Sorry, none of the tools fits this.", "There is no tool for this among those that I can use.",
)  # fmt: skip
FIXED_ANSWERS = (
    "You are a helpful assistant.", "You are a careful assistant who uses tools.", "Be brief.",
    "You are an assistant of a company. Be polite.", "Help the user with the tools that you have.",
)  # fmt: skip
"""System messages of a user's own."""
GENERAL = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("How many days are there in a week?", "There are seven days in a week."),
    ("What colour is the sky on a clear day?", "The sky is blue on a clear day."),
    ("Tell me a joke.", "Why did the bicycle fall over? Because it was two-tired."),
    ("Hello!", "Hello! How can I help you?"),
    ("Good evening", "Good evening! What can I do for you?"),
    ("Thank you, that was all.", "You're welcome!"),
    ("What is photosynthesis?", "Plants use light to make sugar from water and carbon dioxide."),
    ("What is 2 plus 2?", "2 plus 2 is 4."),
    ("Who are you?", "I am an assistant that can answer questions and call tools."),
    ("What can you do?", "I can answer questions and call the tools that I was given."),
    ("Which planet is closest to the sun?", "Mercury is closest to the sun."),
    ("What do bees make?", "Bees make honey."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Why is the sea salty?", "Rivers carry minerals from rocks into the sea, where they stay."),
    ("Explain gravity in one sentence.", "Gravity is the force by which masses attract each other."),
    ("What is a noun?", "A noun is a word that names a person, a place or a thing."),
    ("How are you today?", "I'm fine, thank you. How can I help you?"),
    ("What language is spoken in Brazil?", "Portuguese is spoken in Brazil."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("Is a whale a fish?", "No, a whale is a mammal."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("How do I become a better writer?", "Read much, write every day, and cut what is not needed."),
    ("What is machine learning?", "Machine learning is the making of programs that learn from data."),
    ("Write a sentence about autumn.", "The leaves turn gold, and the evenings smell of smoke."),
    ("What should I wear to an interview?", "Wear something clean, simple and a little formal."),
    ("What is democracy?", "Democracy is rule by the people, usually through elections."),
    ("How does a magnet work?", "Its atoms are aligned, so that their small fields add up to a large one."),
    ("Recommend a name for a cat.", "How about Pepper?"),
    ("Why do we sleep?", "Sleep lets the body recover and the brain sort its memories."),
    ("What is the boiling point of water?", "Water boils at 100 degrees Celsius at sea level."),
)
