"""The vocabulary of tiny-vl's world: colours, shapes, drawn things, printed words, and their grammar."""

from dataclasses import dataclass
from functools import cache

# Name -> HSV range (hue in degrees, saturation and value in 0..1). Ranges of two names never meet.
COLOURS: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((354, 363), (0.80, 0.95), (0.78, 0.92)),
    "orange": ((24, 32), (0.88, 1.00), (0.95, 1.00)),
    "yellow": ((51, 57), (0.75, 1.00), (0.95, 1.00)),
    "green": ((115, 145), (0.65, 0.90), (0.50, 0.70)),
    "blue": ((214, 230), (0.70, 0.92), (0.65, 0.90)),
    "purple": ((272, 285), (0.60, 0.80), (0.50, 0.70)),
    "pink": ((332, 345), (0.30, 0.45), (0.96, 1.00)),
    "brown": ((20, 28), (0.60, 0.75), (0.36, 0.46)),
    "black": ((0, 360), (0.00, 0.20), (0.03, 0.09)),
    "grey": ((0, 360), (0.00, 0.03), (0.48, 0.58)),
    "white": ((0, 360), (0.00, 0.02), (0.96, 1.00)),
}

# Name -> the largest rotation in degrees that leaves the shape itself.
SHAPES: dict[str, float] = {
    "circle": 0,
    "square": 10,
    "triangle": 15,
    "star": 25,
    "heart": 20,
    "diamond": 10,
    "pentagon": 10,
    "oval": 12,
    "cross": 10,
    "ring": 0,
    "crescent": 20,
    "arrow": 15,
}

# Category -> "name glyph" pairs, glyphs of the OFL-licensed font Noto Color Emoji.
_GLYPHS = {
    "animal": """cat 🐱, dog 🐶, mouse 🐭, rabbit 🐰, fox 🦊, bear 🐻, panda 🐼,
        koala 🐨, tiger 🐯, lion 🦁, cow 🐮, pig 🐷, frog 🐸, monkey 🐵, chicken 🐔,
        penguin 🐧, bird 🐦, duck 🦆, owl 🦉, eagle 🦅, bat 🦇, wolf 🐺, horse 🐴,
        unicorn 🦄, bee 🐝, caterpillar 🐛, butterfly 🦋, snail 🐌, ladybird 🐞,
        ant 🐜, spider 🕷, scorpion 🦂, turtle 🐢, snake 🐍, lizard 🦎, dinosaur 🦕,
        octopus 🐙, squid 🦑, shrimp 🦐, lobster 🦞, crab 🦀, fish 🐟, pufferfish 🐡,
        dolphin 🐬, whale 🐳, shark 🦈, crocodile 🐊, zebra 🦓, gorilla 🦍,
        elephant 🐘, rhino 🦏, camel 🐫, giraffe 🦒, kangaroo 🦘, sheep 🐑, goat 🐐,
        deer 🦌, turkey 🦃, peacock 🦚, parrot 🦜, swan 🦢, flamingo 🦩, raccoon 🦝,
        hedgehog 🦔, squirrel 🐿""",
    "plant": """tree 🌳, pine tree 🌲, palm tree 🌴, cactus 🌵, tulip 🌷, rose 🌹,
        sunflower 🌻, blossom 🌸, mushroom 🍄, maple leaf 🍁, clover 🍀, seedling 🌱""",
    "food": """apple 🍎, pear 🍐, tangerine 🍊, lemon 🍋, banana 🍌, watermelon 🍉,
        strawberry 🍓, pineapple 🍍, coconut 🥥, kiwi 🥝, tomato 🍅, aubergine 🍆,
        avocado 🥑, carrot 🥕, corn cob 🌽, chilli 🌶, cucumber 🥒, potato 🥔,
        onion 🧅, loaf 🍞, croissant 🥐, baguette 🥖, pretzel 🥨, cheese wedge 🧀,
        hamburger 🍔, pizza 🍕, hot dog 🌭, taco 🌮, ice cream 🍦, doughnut 🍩,
        cookie 🍪, birthday cake 🎂, cupcake 🧁, lollipop 🍭, chocolate bar 🍫,
        coffee cup ☕, teapot 🫖, wine glass 🍷, beer mug 🍺, cocktail 🍸""",
    "vehicle": """car 🚗, taxi 🚕, bus 🚌, fire engine 🚒, ambulance 🚑, lorry 🚚,
        tractor 🚜, racing car 🏎, motorcycle 🏍, scooter 🛵, bicycle 🚲, locomotive 🚂,
        aeroplane ✈, rocket 🚀, helicopter 🚁, sailing boat ⛵, ship 🚢, canoe 🛶,
        flying saucer 🛸, satellite 🛰""",
    "building": """house 🏠, church ⛪, castle 🏰, factory 🏭, tent ⛺, Ferris wheel 🎡,
        fountain ⛲, tower 🗼""",
    "tool": """hammer 🔨, axe 🪓, saw 🪚, screwdriver 🪛, spanner 🔧, pickaxe ⛏,
        magnet 🧲, ladder 🪜, key 🔑, padlock 🔒, anchor ⚓, gear ⚙, broom 🧹,
        bucket 🪣, dagger 🗡, shield 🛡, microscope 🔬, telescope 🔭, compass 🧭,
        syringe 💉, thermometer 🌡, light bulb 💡, torch 🔦, candle 🕯,
        magnifying glass 🔍""",
    "object": """book 📕, pencil ✏, paintbrush 🖌, envelope ✉, newspaper 📰,
        laptop 💻, mobile phone 📱, telephone ☎, television 📺, radio 📻, camera 📷,
        battery 🔋, electric plug 🔌, alarm clock ⏰, hourglass ⌛, watch ⌚,
        money bag 💰, coin 🪙, gem 💎, crown 👑, gift 🎁, balloon 🎈, umbrella ☂,
        chair 🪑, sofa 🛋, bed 🛏, door 🚪, toilet 🚽, bathtub 🛁, shopping cart 🛒,
        suitcase 🧳, backpack 🎒, handbag 👜, teddy bear 🧸, kite 🪁, puzzle piece 🧩,
        trophy 🏆, medal 🏅, bell 🔔, toothbrush 🪥, basket 🧺, bomb 💣,
        traffic light 🚦, stop sign 🛑, crystal ball 🔮, pushpin 📌, robot 🤖, ghost 👻,
        alien 👽, skull 💀, pumpkin 🎃, snowman ⛄""",
    "music": """guitar 🎸, violin 🎻, trumpet 🎺, saxophone 🎷, drum 🥁, piano 🎹,
        accordion 🪗, banjo 🪕, microphone 🎤""",
    "clothing": """T-shirt 👕, dress 👗, shoe 👟, boot 👢, high heel 👠, top hat 🎩,
        cap 🧢, scarf 🧣, coat 🧥, straw hat 👒, lipstick 💄, kimono 👘""",
    "sport": """football ⚽, basketball 🏀, tennis racket 🎾, baseball ⚾, rugby ball 🏉,
        dartboard 🎯, boxing glove 🥊, skateboard 🛹, roller skate 🛼, ice skate ⛸,
        sledge 🛷""",
    "weather": """sun ☀, cloud ☁, rainbow 🌈, snowflake ❄, lightning bolt ⚡,
        tornado 🌪, flame 🔥, water drop 💧, wave 🌊, volcano 🌋, comet ☄, globe 🌍,
        mountain 🏔""",
}

# Glyphs that the model is never taught the names of: they stand for things outside its world.
STRANGER_GLYPHS = tuple("😀😎😡😴🥶🤡👹👮👶👵🧙🧜✋👍👂👀👄🦷🧠🦴👣🎎🎏♻☢⚠🚭🔞♈♋🈴🆗🔀🎫🗿🕋🛕🧬🧿🪬🀄🃏🎴")

_WORD_TEXT = """
    act air arm art bag ball band bank bar bath bell best big bird blue boat book box boy bread bus cake
    call camp card care city clean club coat cold cook cool corn dance dark day deep desk door down dream
    east easy exit face farm fast film fire fish five flag food free fresh game gate gift girl gold good
    green hand happy hello help high home hot hotel house ice idea jazz jump kind king lake lamp land large
    left light lion long love lunch magic map market milk moon more music name new night north old open
    park pay peace phone plan play pool post press pull push queen quick quiet rain read red rest right
    ring road room run safe sale salt school sea shop sign silver sky slow snow soft song south spring
    star start stop store street sugar summer sun sweet table tax tea ten time tower town train tree
    water way west white wild wind winter wood world yes yellow young zone zoom
"""
WORDS: tuple[str, ...] = tuple(_WORD_TEXT.split())

NUMBERS = ("no", "one", "two", "three", "four")

_IRREGULAR = {
    "mouse": "mice",
    "fish": "fish",
    "pufferfish": "pufferfish",
    "sheep": "sheep",
    "deer": "deer",
    "squid": "squid",
    "shrimp": "shrimp",
    "wolf": "wolves",
    "loaf": "loaves",
    "maple leaf": "maple leaves",
    "octopus": "octopuses",
    "cactus": "cacti",
    "scarf": "scarves",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "tornado": "tornadoes",
    "volcano": "volcanoes",
}


@dataclass(frozen=True, slots=True)
class Noun:
    """Something that can be placed in a scene.

    ``kind`` is "shape", "thing" or "word"; ``colour`` is the name of a shape's or a word's ink and
    empty for things; ``category`` groups things for the placard.
    """

    kind: str
    name: str
    colour: str = ""
    category: str = "shape"

    @property
    def label(self) -> str:
        """The noun without an article: ``cat``, ``red circle``, ``word "open" in red``."""
        if self.kind == "word":
            return f'word "{self.name}" in {self.colour}'
        return f"{self.colour} {self.name}" if self.kind == "shape" else self.name

    @property
    def phrase(self) -> str:
        """The noun with its article, as a sentence introduces it: ``a cat``, ``the word "open" in red``."""
        return f"the {self.label}" if self.kind == "word" else f"{article(self.label)} {self.label}"

    def counted(self, count: int) -> str:
        """``a cat`` or ``three cats``."""
        return self.phrase if count == 1 else f"{NUMBERS[count]} {plural(self.label)}"


@cache
def things() -> dict[str, tuple[str, str]]:
    """Name of each drawn thing -> (glyph, category)."""
    table: dict[str, tuple[str, str]] = {}
    for category, text in _GLYPHS.items():
        for entry in text.split(","):
            name, glyph = entry.strip().rsplit(" ", 1)
            table[name] = (glyph, category)
    return table


def article(label: str) -> str:
    """``a`` or ``an`` by the label's first sound (``a unicorn``, ``an hourglass``)."""
    vowel = label[0] in "aeiou" and not label.startswith("uni")
    return "an" if vowel or label.startswith("hour") else "a"


def plural(label: str) -> str:
    """The plural of a label; adjectives in front are kept."""
    if label in _IRREGULAR:
        return _IRREGULAR[label]
    head, _, last = label.rpartition(" ")
    word = _IRREGULAR.get(last) or _regular_plural(last)
    return f"{head} {word}" if head else word


def _regular_plural(word: str) -> str:
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def capital(text: str) -> str:
    """The text with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]
