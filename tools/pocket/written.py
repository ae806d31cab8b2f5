"""What pocket itself writes on from passages of its books: the text that its head has to guess.

Books alone teach a head what pocket thinks of other people's sentences. It drafts for pocket's own,
which are plainer, behind short prompts and long ones; docs/architecture/pocket.md says what this is
worth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from corpus import Corpus
from localllm import SamplingParams
from localllm.answer.opening import open_model
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig

SEED = 5
# Temperature and top-p, each as likely as it stands here.
SAMPLINGS = ((0.0, 1.0), (0.3, 0.9), (0.6, 1.0), (1.0, 1.0), (1.0, 1.0))
AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Writing:
    """Rows of `row_tokens` tokens, of which the first come from a book: at least `shortest`, at
    most `longest`.
    """

    name: str
    num_rows: int
    row_tokens: int
    shortest: int
    longest: int


SHORT = Writing("short", 4000, 513, 16, 256)
LONG = Writing("long", 1200, 1025, 384, 896)
LONGEST = Writing("longest", 300, 2048, 1024, 1920)


def written_rows(
    writing: Writing, folder: Path, corpus: Corpus, work: Path
) -> npt.NDArray[np.int64]:
    """The rows, int64 [num_rows, row_tokens], by the model in `folder`; kept in `work`."""
    path = work / f"written-{writing.name}.npy"
    if not path.exists():
        np.save(path, _write(writing, folder, corpus))
    return np.load(path).astype(np.int64)


def _write(writing: Writing, folder: Path, corpus: Corpus) -> npt.NDArray[np.uint16]:
    config = EngineConfig(speculation=SpeculationConfig("off"), dtype="float32")
    engine = open_model(str(folder), config).text_engine.engine
    draw = _prompts(writing, corpus)
    unfinished: dict[int, list[int]] = {}
    rows: list[list[int]] = []
    num_begun = 0
    while num_begun < writing.num_rows or unfinished:
        while num_begun < writing.num_rows and len(unfinished) < AT_ONCE:
            prompt, params = draw()
            unfinished[engine.add_request(prompt, params)] = prompt
            num_begun += 1
        for event in engine.step():
            if event.token_id is not None:
                unfinished[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                rows.append(unfinished.pop(event.request_id))
    whole = [row for row in rows if len(row) == writing.row_tokens]
    return np.array(whole, dtype=np.uint16)


def _prompts(writing: Writing, corpus: Corpus) -> Callable[[], tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(SEED)
    passages = [each for each in corpus.training if len(each) > writing.longest + 44]
    weights = np.array([len(each) for each in passages], float)
    weights /= weights.sum()

    def draw() -> tuple[list[int], SamplingParams]:
        passage = passages[rng.choice(len(passages), p=weights)]
        length = int(rng.integers(writing.shortest, writing.longest + 1))
        start = int(rng.integers(0, len(passage) - length))
        temperature, top_p = SAMPLINGS[int(rng.integers(len(SAMPLINGS)))]
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=int(rng.integers(1 << 40)),
            max_tokens=writing.row_tokens - length,
            ignore_eos=True,
        )
        return passage[start : start + length].astype(int).tolist(), params

    return draw
