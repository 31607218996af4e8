"""Values that conversations are about: how a user says one, and how it stands in JSON."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

WORDS: dict[str, str] = {
    "city": "Lisbon,Oslo,Nairobi,Kyoto,Denver,Lima,Hamburg,Porto,Austin,Cairo,Dublin,Montreal,Seville,Krakow,"
    "Boston,Hanoi,Perth,Ghent,Tucson,Leeds,Naples,Santiago,Seoul,Marseille,Glasgow,Portland,Zurich,Accra,"
    "New Orleans,San Diego,Cape Town,Buenos Aires,Salt Lake City,Las Vegas,Kuala Lumpur,Mexico City,Chicago,"
    "Paris,London,Tokyo,Berlin,Madrid,Rome,Vienna,Sydney,Toronto,Miami,Seattle,Houston,Mumbai,Dubai,Athens",
    "country": "Portugal,Norway,Kenya,Japan,Peru,Germany,Egypt,Ireland,Canada,Spain,Poland,Vietnam,Australia,"
    "Belgium,Italy,Chile,South Korea,France,Ghana,New Zealand,South Africa,Brazil,India,Mexico,Turkey,Greece",
    "state": "Texas,California,Ohio,Florida,Oregon,Nevada,Maine,Georgia,Utah,Colorado,New York,Virginia,Iowa",
    "first": "Anna,Ben,Carla,David,Elena,Farid,Grace,Hugo,Ines,Jonas,Kavya,Liam,Mona,Noah,Olga,Pablo,Quinn,"
    "Rosa,Samuel,Tara,Umar,Vera,Wei,Ximena,Yusuf,Zoe,John,Mary,Alice,Bob,Emma,Lucas,Priya,Omar,Nina,Felix",
    "last": "Novak,Okafor,Silva,Tanaka,Meyer,Rossi,Haddad,Larsen,Kim,Duarte,Walsh,Petrov,Singh,Moreau,Costa,"
    "Fischer,Nguyen,Ortiz,Park,Brown,Jensen,Alvarez,Kowalski,Smith,Johnson,Baker,Reed,Stone,Young,Carter",
    "company": "Northwind,Acme Corp,Bluebird Foods,Kestrel Labs,Apple,Volvo,Siemens,Tesla,Harbor & Sons,"
    "Orion Media,Nestle,Fairfield Motors,Pinecone Software,Nike,Microsoft,Toyota,Larkspur Energy,Amazon",
    "animal": "otter,barn owl,red fox,humpback whale,gecko,honey bee,snow leopard,emperor penguin,dog,cat,"
    "horse,rabbit,parrot,gray wolf,sea turtle,bald eagle,goldfish,elephant,monarch butterfly,badger",
    "plant": "basil,tomato,lavender,maple,fern,rosemary,orchid,oak,cactus,sunflower,mint,bamboo,rose,ivy",
    "food": "oats,rice,chickpeas,salmon,spinach,eggs,cheddar,apples,bread,mushrooms,potatoes,chicken breast,"
    "avocado,almonds,lentils,tofu,bananas,yogurt,carrots,pasta,brown sugar,olive oil,flour,butter,garlic",
    "dish": "lasagna,pad thai,shakshuka,mushroom risotto,chicken curry,lentil soup,tacos,pumpkin pie,ramen,"
    "paella,apple strudel,beef stew,falafel,pancakes,vegetable stir fry,fish and chips,goulash,banana bread",
    "drink": "green tea,espresso,cappuccino,lemonade,orange juice,oat milk latte,hot chocolate,cola,cider",
    "cuisine": "Italian,Thai,Mexican,Indian,Japanese,Greek,Ethiopian,Vietnamese,French,Lebanese,Korean",
    "color": "red,blue,teal,black,white,dark green,yellow,purple,orange,silver,beige,navy,pink,turquoise",
    "language": "Spanish,German,Portuguese,Japanese,Swahili,French,Korean,Arabic,Dutch,Polish,Hindi,Italian",
    "currency": "USD,EUR,GBP,JPY,CHF,CAD,AUD,INR,BRL,MXN,SEK,PLN",
    "book": "The Silent Harbor,Winter Letters,Moby Dick,Dracula,The Glass Orchard,Middlemarch,Emma,Dune,1984,"
    "Frankenstein,A Map of Rivers,Pride and Prejudice,The Hobbit,Jane Eyre,Night Train to Riga",
    "film": "Casablanca,Metropolis,Inception,The Last Ferry,Vertigo,Alien,Amelie,Paper Moons,Rear Window,"
    "Spirited Away,The Godfather,Blue Autumn,Titanic,Parasite,Jaws,The Matrix",
    "song": "Blue Moon,Yesterday,Night Drive,Hallelujah,Paper Boats,Imagine,Summer Rain,Bohemian Rhapsody",
    "artist": "Miles Davis,Adele,Nina Simone,The Beatles,Radiohead,Bach,Billie Holiday,Coldplay,Mozart,Bjork",
    "painter": "Vermeer,Frida Kahlo,Monet,Rembrandt,Van Gogh,Picasso,Klimt,Hokusai,Georgia O'Keeffe,Goya",
    "team": "Riverside United,Boston Celtics,Bayern Munich,Harbor City FC,Chicago Bulls,Ajax,Real Madrid,"
    "Green Bay Packers,Toronto Raptors,Liverpool,Northside Rovers,New York Yankees,Golden State Warriors",
    "sport": "tennis,basketball,rugby,ice hockey,handball,cricket,soccer,volleyball,badminton,golf,rowing",
    "instrument": "violin,piano,cello,trumpet,acoustic guitar,flute,drums,saxophone,ukulele,clarinet,harp",
    "element": "oxygen,iron,helium,gold,copper,neon,sodium,carbon,zinc,silver,nitrogen,lead,calcium,uranium",
    "material": "oak,steel,aluminum,concrete,glass,granite,copper,rubber,pine,brass,plastic,brick,titanium",
    "product": "wireless mouse,desk lamp,running shoes,backpack,coffee grinder,yoga mat,headphones,kettle,"
    "bookshelf,phone case,water bottle,office chair,rain jacket,toaster,gaming laptop,bicycle helmet,tent",
    "room": "kitchen,bedroom,living room,garage,bathroom,hallway,attic,home office,dining room,nursery",
    "device": "thermostat,ceiling fan,heater,coffee machine,air purifier,dishwasher,robot vacuum,sprinkler",
    "job": "carpenter,nurse,data analyst,electrician,teacher,pastry chef,civil engineer,bus driver,lawyer,"
    "translator,software engineer,accountant,plumber,graphic designer,pharmacist,welder",
    "illness": "asthma,migraine,influenza,diabetes,hay fever,anemia,bronchitis,eczema,insomnia,measles",
    "drug": "ibuprofen,amoxicillin,metformin,aspirin,loratadine,insulin,paracetamol,omeprazole,lisinopril",
    "planet": "Mars,Jupiter,Venus,Saturn,Neptune,Mercury,Uranus,Earth",
    "ticker": "AAPL,TSLA,MSFT,NVDA,AMZN,KO,DIS,SAP,IBM,F,NFLX,INTC",
    "airport": "JFK,LAX,LIS,HAM,NRT,SFO,CDG,AMS,DUB,ORD,MUC,SEA,GRU,YYZ",
    "museum": "the Louvre,the Prado,the Rijksmuseum,the Tate Modern,the British Museum,the Uffizi",
    "street": "12 Elm Street,48 Harbor Road,7 Mill Lane,210 Oak Avenue,95 King Street,3 Station Square,"
    "1600 Maple Drive,27 Rue de Lyon,64 Hill Crescent,1050 Sunset Boulevard",
    "topic": "climate change,electric cars,the housing market,artificial intelligence,space exploration,"
    "remote work,renewable energy,vaccines,ocean pollution,the Olympics,inflation,coffee farming,bees",
    "event": "the budget review,a dentist appointment,the team lunch,a yoga class,the project kickoff,"
    "my sister's wedding,the quarterly meeting,a guitar lesson,the parents' evening,the product launch",
    "task": "water the plants,call the bank,buy milk,renew the passport,pay the rent,feed the cat,"
    "send the invoice,book the flights,take out the trash,pick up the parcel,back up the laptop",
    "message": "I am running ten minutes late,Happy birthday!,The meeting moved to room 4,See you tomorrow,"
    "Please bring the keys,Dinner is ready,The parcel has arrived,Thanks for your help,Call me back",
    "sentence": "The cat sleeps on the warm roof,Where is the train station,I would like a cup of coffee,"
    "Good morning everyone,The shop opens at nine,We will meet next week,My name is on the list,"
    "This phone broke after two days,What a wonderful evening,The soup was cold and the service slow",
    "word": "harbor,lantern,serendipity,gravity,velvet,whisper,bridge,thunder,ladder,quartz,puzzle,meadow",
    "file": "report.pdf,budget_2024.xlsx,notes.txt,photo_17.jpg,backup.zip,slides.pptx,data.csv,main.py",
    "folder": "/home/anna/docs,/var/log,Downloads,projects/alpha,/tmp/export,Invoices,C:/Users/ben/Desktop",
    "historic": "the French Revolution,the moon landing,World War II,the fall of the Berlin Wall,"
    "the Industrial Revolution,the American Civil War,the Battle of Hastings,the Renaissance",
    "leader": "Julius Caesar,Cleopatra,Abraham Lincoln,Queen Victoria,Napoleon,Genghis Khan,Nelson Mandela",
    "game": "chess,Catan,Minecraft,poker,Monopoly,Zelda,Scrabble,Tetris,bridge,backgammon,Portal,Fortnite",
    "genre": "jazz,rock,classical,hip hop,folk,electronic,country,blues,reggae,pop",
    "fabric": "cotton,linen,wool,silk,denim,velvet,leather,polyester",
    "hobby": "hiking,photography,knitting,swimming,gardening,pottery,cycling,birdwatching,climbing,baking",
    "landmark": "the Eiffel Tower,Central Park,the Brandenburg Gate,Big Ben,the Colosseum,Times Square",
    "vehicle": "Honda Civic,Ford Focus,Volvo XC60,Toyota Corolla,Tesla Model 3,Fiat 500,Jeep Wrangler",
    "crop": "wheat,corn,soybeans,barley,rice,cotton,potatoes,sunflowers",
    "gene": "BRCA1,TP53,CFTR,HBB,APOE,MYC",
    "symbol": "heart,star,anchor,moon,arrow,leaf",
    "function": "x^2 + 3x,2x^3 - 5,sin(x),e^x,4x + 7,x^2 - 4x + 1,3x^2,cos(2x)",
    "dna": "ATGCGTAC,GGCATTA,TTAGGC,ACGTACGT,CCGATAGG",
    "note": "C,D,E,F,G,A,B,F sharp,B flat",
}
LISTS = {name: words.split(",") for name, words in WORDS.items()}
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


class Value(NamedTuple):
    """As a user says it, and as it stands in JSON."""

    said: str
    json: Any


def _person(rng: random.Random) -> Value:
    name = f"{rng.choice(LISTS['first'])} {rng.choice(LISTS['last'])}"
    return Value(name, name)


def _email(rng: random.Random) -> Value:
    first, last = rng.choice(LISTS["first"]).lower(), rng.choice(LISTS["last"]).lower()
    host = rng.choice(["example.com", "mail.org", "northwind.io", "kestrel.net", "post.co"])
    text = rng.choice((f"{first}.{last}@{host}", f"{first}{rng.randint(1, 99)}@{host}", f"{last}@{host}"))
    return Value(text, text)


def _phone(rng: random.Random) -> Value:
    text = rng.choice(("+1-555-{0}", "555-{0}", "+44 20 7946 {0}")).format(rng.randint(1000, 9999))
    return Value(text, text)


def _url(rng: random.Random) -> Value:
    text = f"https://{rng.choice(LISTS['word'])}.{rng.choice(('com', 'org', 'io'))}"
    if rng.random() < 0.5:
        text += f"/{rng.choice(LISTS['word'])}"
    return Value(text, text)


def _code(rng: random.Random) -> Value:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    number = rng.randint(10, 99999)
    text = rng.choice(("{0}-{1}", "{0}{1}", "#{1}", "{1}", "{0}_{1}")).format(letters, number)
    return Value(text, text)


def _date(rng: random.Random) -> Value:
    year, month, day = rng.randint(2021, 2027), rng.randint(1, 12), rng.randint(1, 28)
    name, iso = _MONTHS[month - 1], f"{year}-{month:02}-{day:02}"
    ordinal = f"{day}{'th' if 10 < day < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
    said = rng.choice(
        (
            f"{name} {day}, {year}",
            f"{day} {name} {year}",
            f"{name} {ordinal}, {year}",
            iso,
            iso,
            f"the {ordinal} of {name} {year}",
            f"{name[:3]} {day} {year}",
        )
    )
    return Value(said, iso)


def _time(rng: random.Random) -> Value:
    hour, minute = rng.randint(0, 23), rng.choice((0, 0, 15, 30, 45, 10))
    half = "am" if hour < 12 else "pm"
    short = f"{(hour - 1) % 12 + 1}" + (f":{minute:02}" if minute or rng.random() < 0.2 else "")
    said = rng.choice((f"{short} {half}", f"{short}{half}", f"{hour:02}:{minute:02}"))
    return Value(said, f"{hour:02}:{minute:02}")


def _money(rng: random.Random) -> Value:
    value = rng.choice((rng.randint(5, 99), rng.randint(1, 99) * 100, rng.randint(1, 500) * 1000))
    sign, unit = rng.choice((("$", ""), ("$", ""), ("", " dollars"), ("", " euros"), ("", "")))
    shown = f"{value:,}" if rng.random() < 0.6 else str(value)
    return Value(f"{sign}{shown}{unit}", value)


def _percent(rng: random.Random) -> Value:
    value = rng.choice((rng.randint(1, 60), rng.randint(10, 99) / 10))
    return Value(rng.choice((f"{value}%", f"{value} percent")), value)


def _rate(rng: random.Random) -> Value:
    tenths = rng.choice((rng.randint(1, 30) * 10, rng.randint(10, 99)))
    shown = f"{tenths / 10:g}"
    return Value(rng.choice((f"{shown}%", f"{shown} percent")), round(tenths / 1000, 4))


def _coordinates(rng: random.Random) -> Value:
    lat, lng = (
        round(rng.uniform(-70, 70), rng.randint(1, 4)),
        round(rng.uniform(-170, 170), rng.randint(1, 4)),
    )
    said = rng.choice((f"latitude {lat} and longitude {lng}", f"{lat}, {lng}", f"({lat}, {lng})"))
    return Value(said, {"latitude": lat, "longitude": lng})


def _zip(rng: random.Random) -> Value:
    text = f"{rng.randint(10000, 99999)}"
    return Value(text, text)


KINDS: dict[str, tuple[str, Callable[[random.Random], Value]]] = {
    "person": ("string", _person),
    "email": ("string", _email),
    "phone": ("string", _phone),
    "url": ("string", _url),
    "code": ("string", _code),
    "date": ("string", _date),
    "time": ("string", _time),
    "zip": ("string", _zip),
    "money": ("number", _money),
    "percent": ("number", _percent),
    "rate": ("number", _rate),
    "coordinates": ("object", _coordinates),
}
FORMATS = {
    "date": ("in the format YYYY-MM-DD", "(YYYY-MM-DD)", "as YYYY-MM-DD"),
    "time": ("in 24-hour format HH:MM", "(HH:MM)"),
    "rate": ("as a decimal", "as a decimal, e.g. 0.05 for 5%"),
    "percent": ("in percent",),
}
"""What a description must say for the value to be clear."""

_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def integer(rng: random.Random, low: int, high: int) -> Value:
    """A whole number, said in digits or sometimes in words."""
    value = rng.randint(low, high)
    if high >= 1000 and value > 100:
        value = round(value, -len(str(value)) + rng.randint(1, 3))
    if 0 < value <= 12 and rng.random() < 0.25:
        return Value(_SMALL[value], value)
    return Value(f"{value:,}" if value >= 10000 and rng.random() < 0.6 else str(value), value)


def decimal(rng: random.Random, low: float, high: float) -> Value:
    """A number, whole or not."""
    value = round(rng.uniform(low, high), rng.choice((0, 1, 1, 2)))
    value = int(value) if value == int(value) else value
    return Value(f"{value}", value)


def word(rng: random.Random, kind: str) -> Value:
    """One of a kind's words."""
    text = rng.choice(LISTS[kind])
    bare = text.removeprefix("the ").removeprefix("a ")
    return Value(text, bare)


def joined(rng: random.Random, said: list[str]) -> str:
    """Several values in a sentence."""
    if len(said) == 1:
        return said[0]
    last = rng.choice((" and ", " and ", ", and ", ", "))
    return ", ".join(said[:-1]) + last + said[-1]
