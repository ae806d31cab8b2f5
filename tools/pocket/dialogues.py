"""Conversations for training: questions about localllm, inference and the model itself, small talk
and stories, put together from `knowledge/*.toml` by a seeded generator.

A topic there has whole questions (`ask`), noun phrases that fit into the frames below (`names`),
answers and what to add on "tell me more"; or it is `answered_by` another topic. Related topics
share an answer that covers them all: it serves the reader as well, and eight million parameters
tell forty answers apart better than a hundred. The questions in `held_out.toml` are never read
here: they measure whether the model understands a wording that it was not trained on.
"""

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from corpus import END_OF_TEXT
from stories import described, draw_subject, tell_story

IGNORED = -100  # what torch's cross-entropy leaves out
KNOWLEDGE = Path(__file__).with_name("knowledge")
_OPENING_SHARE = 0.8  # of the conversations in a row
_OPENING_TOKENS = 8
_STORY_SHARE = 0.12

_FRAMES = (
    "What is {}?",
    "What exactly is {}?",
    "What does {} mean?",
    "What is meant by {}?",
    "Explain {}.",
    "Explain {} in simple words.",
    "Can you explain {} to me?",
    "How does {} work?",
    "Why is {} useful?",
    "Why do people use {}?",
    "Why do I need {}?",
    "What is {} good for?",
    "What is the idea behind {}?",
    "What is the point of {}?",
    "What problem does {} solve?",
    "Tell me about {}.",
    "Tell me something about {}.",
    "Describe {}.",
    "Define {}.",
    "I do not understand {}.",
    "I keep reading about {}. What is it?",
    "I have heard of {}, but what does it do?",
    "Give me a short explanation of {}.",
    "Say in one sentence what {} is.",
    "Help me understand {}.",
    "{}?",
    "{}",
    "meaning of {}",
    "{} explained",
    "{} for beginners",
    "and what about {}?",
)
_PREFIXES = (
    "Please: ",
    "Hi, ",
    "Hello! ",
    "Hey, ",
    "Quick question: ",
    "Sorry, ",
    "Okay, ",
    "So ",
    "One more thing: ",
    "I am new to this. ",
    "I wonder: ",
    "Can you tell me: ",
    "Do you know: ",
)
_OPENINGS = (
    "I have been using this for a week now.",
    "My friend told me about this.",
    "I read about it on the web.",
    "This may be a silly question.",
    "I am writing an article.",
    "I am a student.",
    "I have a new computer.",
    "Let me ask you something.",
    "There is one thing that puzzles me.",
    "I am trying to set this up at work.",
    "Before I go on:",
    "Just so that I understand:",
    "I am not a programmer.",
    "We talked about it yesterday.",
    "In the manual I did not find it.",
)
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the is are was do does did i you me my we it its of to in on for with and or be can "
        "could would should will there this that so if at as by from have has had what",
    )
)
_SUFFIXES = (" Please.", " Thanks!", " Please explain.", " I am curious.", " Keep it short.")
_MORE = (
    "Tell me more.",
    "More, please.",
    "Can you say more about that?",
    "Go on.",
    "And then?",
    "Please go into more detail.",
    "Explain a bit more.",
    "What else should I know about it?",
    "more",
    "I want to know more.",
)
_STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a tale about {}.",
    "Tell a story about {}.",
    "Write a story about {}.",
    "Write me a short story about {}.",
    "Can you tell me a story about {}?",
    "Could you tell a story with {} in it?",
    "I would like to hear a story about {}.",
    "A story about {}, please.",
    "story about {}",
    "Make up a fairy tale about {}.",
    "Invent a bedtime story with {}.",
    "Do you know a story about {}?",
    "Once more, a tale of {}.",
    "Please write something about {} and its adventures.",
    "Give me a little fairy tale in which {} appears.",
    "Tell me a short story about {}.",
    "I want a story about {}.",
    "Could I have a story with {}, please?",
    "Tell us about {} in a story.",
    "A short tale about {}",
    "short story, {}",
    "Hi! Tell me a story about {}.",
    "My daughter wants to hear about {} before she sleeps.",
    "Can you write me a little story of {}?",
    "Once upon a time there was {}. Go on!",
)
_ANY_STORY_REQUESTS = (
    "Tell me a story.",
    "Tell me a fairy tale.",
    "Write a story.",
    "A bedtime story, please.",
    "Can you tell me a story?",
    "I am bored, tell me something nice.",
    "Make up a tale for my children.",
    "Do you know any stories?",
    "Let me hear a short story.",
    "Invent a story for me.",
    "Surprise me with a tale.",
)
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are pocket, a small model.",
    "Answer briefly.",
    "Be polite.",
    "You are a friendly guide to localllm.",
    "Answer in plain English.",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that can be asked about; `questions` holds the frames already filled in."""

    name: str
    questions: tuple[str, ...]
    frames: tuple[str, ...]
    answers: tuple[str, ...]
    more: str | None


def read_topics(folder: Path = KNOWLEDGE) -> list[Topic]:
    """The topics of every `*.toml` in `folder`, in the order of the files."""
    tables = {
        name: table
        for path in sorted(folder.glob("*.toml"))
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }
    topics = []
    for name, table in tables.items():
        frames = tuple(
            frame.format(phrase) for phrase in table.get("names", ()) for frame in _FRAMES
        )
        answering = tables[table.get("answered_by", name)]
        answers = tuple(answering["answers"])
        topics.append(Topic(name, tuple(table["ask"]), frames, answers, answering.get("more")))
    return topics


def _key_words(question: str) -> str:
    """`question` as it would be typed into a search box."""
    words = question.rstrip("?.!").lower().split()
    return " ".join(word for word in words if word not in _STOP_WORDS) or question


def _thin(question: str, rng: random.Random) -> str:
    """`question` with some of its words missing, so that none of them alone decides."""
    words = question.split()
    kept = [word for word in words if rng.random() > 0.15]
    return " ".join(kept) if len(kept) > 2 else question


def _misspell(text: str, rng: random.Random) -> str:
    """`text` with one letter dropped, doubled or swapped with its neighbour."""
    at = rng.randrange(1, max(2, len(text) - 1))
    head, char, tail = text[:at], text[at : at + 1], text[at + 1 :]
    kind = rng.randrange(3)
    if kind == 0:
        return head + tail
    if kind == 1:
        return head + char * 2 + tail
    return head + tail[:1] + char + tail[1:]


def vary(question: str, rng: random.Random) -> str:
    """`question` as another person would type it: fewer words or more, a slip, no capitals. Pasted
    text stays as it is, except that lines at its end may be left out.
    """
    lines = question.split("\n")
    if len(lines) > 1:
        return "\n".join(lines[: max(1, len(lines) - rng.choice((0, 0, 0, 1, 2)))])
    kind = rng.random()
    if kind < 0.12:
        return _key_words(question)
    if kind < 0.35:
        question = _thin(question, rng)
    elif kind < 0.45:
        question = f"{rng.choice(_OPENINGS)} {question}"
    if rng.random() < 0.2 and question[0].isalpha():
        lowered = (
            question
            if question[:2].isupper() or question[:2] == "I "
            else (question[0].lower() + question[1:])
        )
        question = rng.choice(_PREFIXES) + lowered
    if rng.random() < 0.1:
        question += rng.choice(_SUFFIXES)
    if rng.random() < 0.35:
        question = question.lower()
    if rng.random() < 0.35:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = _misspell(question, rng)
    return question


def _draw_question(topics: Sequence[Topic], rng: random.Random) -> tuple[Topic, str, str]:
    """A topic, a question about it and the answer; topics with more wordings come up more often."""
    (topic,) = rng.choices(topics, [sqrt(len(topic.questions)) for topic in topics])
    whole = not topic.frames or rng.random() < 0.7
    question = rng.choice(topic.questions if whole else topic.frames)
    if "\n" not in question and rng.random() < 0.8:
        question = question[0].upper() + question[1:]
    return topic, vary(question, rng), rng.choice(topic.answers)


def _draw_story(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story."""
    subject = draw_subject(rng)
    if rng.random() < 0.15:
        request = rng.choice(_ANY_STORY_REQUESTS)
    else:
        request = rng.choice(_STORY_REQUESTS).format(described(subject, rng))
    return vary(request, rng), tell_story(subject, rng)


def _turns(topics: Sequence[Topic], rng: random.Random) -> list[tuple[str, str]]:
    """Question and answer, and sometimes the follow-up and what it adds."""
    if rng.random() < _STORY_SHARE:
        return [_draw_story(rng)]
    topic, question, answer = _draw_question(topics, rng)
    turns = [(question, answer)]
    if topic.more and rng.random() < 0.12:
        turns.append((vary(rng.choice(_MORE), rng), topic.more))
    return turns


def draw_conversation(topics: Sequence[Topic], rng: random.Random) -> list[tuple[str, str]]:
    """One conversation of one to six turns: roles and texts."""
    parts: list[tuple[str, str]] = []
    if rng.random() < 0.15:
        parts.append(("system", rng.choice(_SYSTEM_PROMPTS)))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        for question, answer in _turns(topics, rng):
            parts += [("user", question), ("assistant", answer)]
    return parts


def draw_texts(topics: Sequence[Topic], seed: int, num_conversations: int) -> list[str]:
    """The texts of some conversations, for the vocabulary."""
    rng = random.Random(seed)
    return [text for _ in range(num_conversations) for _, text in draw_conversation(topics, rng)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows and what is to be learnt from them: int64 [num_rows, length + 1] each.

    `targets` are the same ids, IGNORED where a token is not to be predicted.
    """

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


def dialogue_rows(
    topics: Sequence[Topic], tokenizer: Tokenizer, seed: tuple[int, int], num_rows: int, length: int
) -> Rows:
    """Rows of conversations end to end, a function of `seed` alone; only answers are targets.

    Most are a single question with the opening of its answer. The opening decides which answer it
    is; the rest is soon known by heart and would only take the place of other questions.
    """
    rng = random.Random(f"{seed[0]}:{seed[1]}")
    rows = Rows(*(np.zeros((num_rows, length + 1), dtype=np.int64) for _ in range(2)))
    for row, row_targets in zip(rows.ids, rows.targets, strict=True):
        ids: list[int] = []
        targets: list[int] = []
        while len(ids) <= length:
            is_opening = rng.random() < _OPENING_SHARE
            if is_opening:
                if rng.random() < _STORY_SHARE:
                    question, answer = _draw_story(rng)
                else:
                    _, question, answer = _draw_question(topics, rng)
                parts = [("user", question), ("assistant", answer)]
            else:
                parts = draw_conversation(topics, rng)
            for role, text in parts:
                head = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False).ids
                body = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
                tail = tokenizer.encode("\n", add_special_tokens=False).ids
                if is_opening and role == "assistant":
                    body, tail = body[:_OPENING_TOKENS], []
                ids += [*head, *body, *tail]
                learnt = body if role == "assistant" else [IGNORED] * len(body)
                targets += [*[IGNORED] * len(head), *learnt, *[IGNORED] * len(tail)]
            ids.append(tokenizer.token_to_id(END_OF_TEXT))
            targets.append(IGNORED)
        row[:], row_targets[:] = ids[: length + 1], targets[: length + 1]
    return rows
