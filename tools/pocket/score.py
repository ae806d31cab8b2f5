"""Ask pocket the held-out questions and count the right answers.

    python tools/pocket/score.py [--model FOLDER] [--show wrong|all|none] [--floor 0.8]
                                 [--questions held_out.toml|held_out_newcomers.toml]

The questions were written, and committed, before the wordings that pocket is trained on, by
someone who had not seen those; `dialogues.py` never reads them. A (greedy) answer is right when
every pattern of its topic is found in it, ignoring case. The exit code is 10 when the share of
right answers is below the floor. Some short wordings ("hello") occur both here and in the training
set; the share without them is given too.
"""

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from dialogues import read_topics
from localllm import LLM, SamplingParams

QUESTIONS = Path(__file__).with_name("held_out.toml")
BELOW_FLOOR = 10


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and the patterns that a right answer to it contains."""

    topic: str
    text: str
    expects: tuple[str, ...]

    def is_answered_by(self, answer: str) -> bool:
        """Whether every pattern is found in `answer`."""
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.expects)


def read_questions(path: Path) -> list[Question]:
    """The held-out questions, topic by topic."""
    topics = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Question(name, text, tuple(topic["expects"]))
        for name, topic in topics.items()
        for text in topic["questions"]
    ]


def plain(text: str) -> str:
    """`text` without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def main() -> None:
    """Ask, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--show", choices=("wrong", "all", "none"), default="wrong")
    parser.add_argument("--floor", type=float, default=0.8)
    args = parser.parse_args()
    questions = read_questions(args.questions)
    model = LLM(args.model)
    answers = model.chat(
        [[{"role": "user", "content": question.text}] for question in questions],
        SamplingParams(temperature=0.0, max_tokens=200),
    )
    is_right = [q.is_answered_by(a.text) for q, a in zip(questions, answers, strict=True)]
    for question, answer, good in zip(questions, answers, is_right, strict=True):
        if args.show == "all" or (args.show == "wrong" and not good):
            verdict = "right" if good else "WRONG"
            sys.stdout.write(f"{verdict} [{question.topic}] {question.text}\n    {answer.text}\n\n")
    trained = {plain(text) for topic in read_topics() for text in topic.questions}
    new = [
        good
        for question, good in zip(questions, is_right, strict=True)
        if plain(question.text) not in trained
    ]
    share = sum(is_right) / len(is_right)
    sys.stdout.write(
        f"{sum(is_right)} of {len(is_right)} right: {share:.1%}; "
        f"of the {len(new)} that are not in the training set: {sum(new) / len(new):.1%}\n"
    )
    if share < args.floor:
        raise SystemExit(BELOW_FLOOR)


if __name__ == "__main__":
    main()
