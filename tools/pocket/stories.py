"""Short tales about a given subject, drawn from skeletons; what "tell me a story about …" is
trained on.

The books hold few stories that begin and end within the 300 tokens of an answer, and none that
names its subject first. These do: each keeps to its subject from the first sentence to the last,
so that a small model can learn to carry a word of the question through the whole answer.
"""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


_BEINGS = _words("""
king queen prince princess knight wizard witch giant dwarf fairy shepherd miller tailor
soldier sailor fisherman hunter farmer baker blacksmith merchant thief beggar cook gardener painter
musician teacher doctor captain pirate traveller old_woman old_man little_girl little_boy
girl boy brother sister mother father grandmother child servant maid woodcutter goose-girl robot
ghost monster dragon unicorn mermaid troll goblin elf angel clown scientist astronaut detective
fox wolf bear lion tiger mouse rat cat dog horse donkey cow goat sheep lamb pig rabbit hare
hedgehog squirrel frog toad snake turtle fish whale crab bee ant spider butterfly snail bird owl
raven crow swan duck duckling goose hen rooster sparrow eagle nightingale elephant monkey camel
hamster penguin parrot deer kitten puppy""")
_THINGS = _words("""
ship boat lamp lantern mirror ring crown sword bell clock chair table kettle pot spoon
candle box key door window bridge mill tower castle house cottage garden well river lake mountain
forest tree oak rose flower apple pear pumpkin stone star moon cloud snowman drum violin flute book
letter map hat cloak shoe boot glove needle broom wheel cart train balloon kite doll teapot machine
computer island village city""")
_REALMS = ("the sea", "the moon", "the winter", "the wind", "the rain", "the desert", "the forest")

_NAMES = _words("Anna Tom Clara Peter Mary Jack Rose Hans Ella Will Lucy Sam Greta Ben Nell Oliver")
_ADJECTIVES = _words("small old young proud clever lonely merry brave quiet curious foolish gentle")
_PLACES = (
    "at the edge of a great forest",
    "in a village by the sea",
    "on a green hill",
    "in a far country",
    "near an old mill",
    "in a valley between two mountains",
    "beside a deep river",
    "in a town with narrow streets",
)
_WISHES = (
    "to see the world",
    "to find a friend",
    "to hear a new song",
    "to know what lay beyond the hills",
    "to be of use to somebody",
    "to see the snow",
    "to own a golden apple",
    "to sleep one night without fear",
)
_HELPERS = (
    "an old woman with a basket",
    "a grey owl",
    "a poor shepherd",
    "a little bird",
    "a hungry mouse",
    "a tired soldier",
    "a child who had lost her way",
    "a blind musician",
)
_GIFTS = (
    "a silver key",
    "half a loaf of bread",
    "a small lantern",
    "a red thread",
    "a whistle made of bone",
    "a warm cloak",
    "three white stones",
    "a good word",
)
_TROUBLES = (
    "a great storm came up and the night grew as black as a chimney",
    "the bridge was broken and the water ran high",
    "the path was lost under the snow",
    "a thief had stolen all the bread in the village",
    "the well ran dry and nobody could sleep for thirst",
    "the gate of the town was shut and nobody had the key",
)
_TURNS = (
    "Then the gift was remembered, and it showed the way",
    "But courage is a kind of light, and it was enough",
    "Nobody knew what to do, but patience found an answer",
    "It took three days and three nights, and then it was done",
    "Everyone laughed at the plan, but the plan was good",
)
_ENDINGS = (
    "From that day on {the} was never alone again.",
    "And if nobody has told them to stop, they are dancing still.",
    "And so {the} went home, and was content.",
    "Since then people in that country speak kindly of {the}.",
    "That night {the} slept well, and dreamed of nothing at all.",
    "And what {the} had learnt was told to the children for many years.",
)

_BEING_TALES = (
    "{once} there was {a_adj} {x} who lived {place}. Every morning {the} looked out and longed "
    "{wish}. One day {the} set out with nothing but {gift}. On the road {the} met {helper}, who "
    'said: "Where are you going, and may I come with you?" "Come," said {the}, "two are better '
    'than one." But in the evening {trouble}. {turn}. {end}',
    "{once} {a_adj} {x} lived {place}, and was called {name}. {name} had only one wish: {wish}. "
    '"You are much too {adj2}," said the neighbours, but {name} did not listen. After a long walk '
    "{the} came upon {helper}, and shared the last of the bread. For this {the} was given {gift}. "
    "Soon it was needed, for {trouble}. {turn}. {end}",
    "{once} there was {a} {x}, and nobody had ever seen one so {adj2}. It happened in the winter "
    'that {trouble}. "Who will help us?" cried the people. "I will," said {the}. They laughed, '
    "but {helper} did not laugh, and gave {the} {gift}. {turn}. Then the people were ashamed, and "
    "asked {the} to stay. {end}",
    "{once} there was {a_adj} {x} {place}. In the same place lived {helper}, and the two could "
    "not bear each other. One night {trouble}. They had to sit by one fire until the morning, and "
    'so they began to talk. "I have always longed {wish}," said {the}. "So have I," said the '
    "other. {turn}. When the sun rose they were friends. {end}",
)
_THING_TALES = (
    "{once} there was {a_adj} {x} {place}. Nobody knew how old it was, and nobody asked. One "
    'evening {trouble}, and {helper} came by and saw {the}. "You are just what I need," said the '
    "stranger. {turn}. From then on people came from far away to look at {the}, and each of them "
    "made a wish. {end}",
    '{once} {name} found {a_adj} {x} {place}. "It is worth nothing," said the neighbours. But '
    "{name} kept {the}, and cared for it every day, and longed {wish}. Then came a night when "
    "{trouble}. Now {the} was worth more than gold. {turn}. {end}",
    "{once} there was {a} {x} that could speak, but only at midnight. {name}, who lived {place}, "
    'was the first to hear it. "What do you want?" asked {name}. "I want {wish}," said {the}. '
    "So {name} took {gift} and the two of them went away together. On the road {trouble}. {turn}. "
    "{end}",
)
_REALM_TALES = (
    "{once} {name} lived {place} and loved nothing so much as {x}. Every evening {name} sat still "
    "and thought of {x}, and longed {wish}. One night {trouble}. Then {helper} knocked at the door "
    'and said: "Come with me, I know the way to {x}." {turn}. When {name} came home, {x} was in '
    "every story that was told. {end_name}",
)
_ONCE = ("Once upon a time", "Once upon a time", "Long ago", "Many years ago", "In the old days")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def draw_subject(rng: random.Random) -> str:
    """A subject as a user would name it, such as `a fox` or `the sea`."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(_REALMS)
    return _with_article(rng.choice(_BEINGS if kind < 0.7 else _THINGS))


def described(subject: str, rng: random.Random) -> str:
    """`subject` as a user asks for it: at times with an adjective, or with a companion."""
    kind = rng.random()
    if subject in _REALMS or kind < 0.7:
        return subject
    noun = subject.split(" ", 1)[1]
    if kind < 0.85:
        return _with_article(f"{rng.choice(_ADJECTIVES)} {noun}")
    return f"{subject} and {_with_article(rng.choice(_BEINGS))}"


def tell_story(subject: str, rng: random.Random) -> str:
    """A tale of six to ten sentences about `subject`, as drawn by `draw_subject`."""
    realm = subject in _REALMS
    noun = subject if realm else subject.split(" ", 1)[1]
    if realm:
        tales = _REALM_TALES
    elif noun in _THINGS:
        tales = _THING_TALES
    else:
        tales = _BEING_TALES
    name, adjective, other = rng.choice(_NAMES), *rng.sample(_ADJECTIVES, 2)
    the = f"the {noun}"
    ending = rng.choice(_ENDINGS)
    return rng.choice(tales).format(
        once=rng.choice(_ONCE),
        a=subject.split(" ", 1)[0],
        a_adj=_with_article(adjective),
        adj2=other,
        x=noun,
        the=the,
        name=name,
        place=rng.choice(_PLACES),
        wish=rng.choice(_WISHES),
        helper=rng.choice(_HELPERS),
        gift=rng.choice(_GIFTS),
        trouble=rng.choice(_TROUBLES),
        turn=rng.choice(_TURNS),
        end=ending.format(the=the),
        end_name=ending.format(the=name),
    )
