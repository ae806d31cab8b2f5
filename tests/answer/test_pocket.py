"""The built-in model is what its card says, and has learnt something."""

import json
import math
import re
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import localllm
from localllm import LLM, SamplingParams
from localllm.chat.conversation import ChatSession
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.hub.catalog import BUILT_IN_MODELS
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.families.table import read_architecture
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files
from localllm.text.prompt import Text

FOLDER = Path(localllm.__file__).parent / "pocket"
TOOLS = Path(__file__).parents[2] / "tools" / "pocket"
# From "The Time Machine", which it was not trained on.
UNSEEN = (
    "The Time Traveller (for so it will be convenient to speak of him) was expounding a recondite "
    "matter to us. His pale grey eyes shone and twinkled, and his usually pale face was flushed "
    "and animated. The fire burnt brightly, and the soft radiance of the incandescent lights in "
    "the lilies of silver caught the bubbles that flashed and passed in our glasses."
)


def test_its_sizes_are_within_the_limits_it_was_made_for() -> None:
    architecture = read_architecture(FOLDER)
    shapes = architecture.tensors()
    assert sum(prod(shape) for shape in shapes.values()) <= 9_000_000
    assert 4096 <= architecture.vocab_size <= 8192
    assert architecture.max_position_embeddings == 2048
    [attention] = architecture.blocks_of(AttentionSpec)
    assert attention.num_kv_heads < attention.num_heads
    assert attention.has_head_norms
    assert architecture.tie_word_embeddings
    for name, shape in shapes.items():
        if len(shape) == 2:
            assert shape[1] % 64 == 0, name
    check_weights(find_weight_files(FOLDER), architecture)


def test_a_cache_in_4_bits_loses_a_thousandth_of_a_nat() -> None:
    """Of 64 keys a query meets its own uncoded: with 32 it would lose 0.0010."""
    text, found = (FOLDER.parents[1] / "LICENSE").read_text(), []
    for kind in ("bf16", "int4"):
        config = EngineConfig(dtype="float32", kv_cache_dtype=kind, max_num_seqs=1, device="cpu")
        loaded = load_decoder(FOLDER, read_architecture(FOLDER), config)
        ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids[:1600]
        dtype = torch.float32 if kind == "bf16" else loaded.kv_dtype
        scorer = WindowScorer(loaded.model, 400, dtype, loaded.codings)
        windows = [ids[i : i + 400] for i in range(0, len(ids), 400)]
        logits = [rows for window in windows for rows in scorer.logits(window)]
        found.append(torch.cat(logits).log_softmax(-1))
    exact, coded = found
    assert 0 < float((exact.exp() * (exact - coded)).sum(-1).mean()) < 0.0008


def test_unseen_english_is_far_likelier_than_chance() -> None:
    llm = LLM(max_num_seqs=1)
    ids = llm.model.prompts.write(Text(UNSEEN)).token_ids
    # The likelihood of each token, one request a prefix; the cache makes them cheap.
    logprobs = []
    for end in range(1, len(ids)):
        forced = llm.sampling_params(max_tokens=1, logprobs=0, logit_bias={ids[end]: 100.0})
        [completion] = llm.generate([ids[:end]], forced)
        [token] = completion.samples[0].tokens
        assert token.token_id == ids[end]
        assert token.logprobs is not None
        logprobs.append(token.logprobs.logprob)
    perplexity = math.exp(-sum(logprobs) / len(logprobs))
    # 6,144 would be chance; whole books it has not seen are in the card.
    assert perplexity < 300


def test_the_card_says_what_it_is() -> None:
    card = (FOLDER / "README.md").read_text()
    assert "demonstration" in card
    parameters = int(re.findall(r"([\d,]+) parameters", card)[0].replace(",", ""))
    architecture = read_architecture(FOLDER)
    assert parameters == sum(prod(shape) for shape in architecture.tensors().values())


def test_the_tools_clean_books_as_they_say() -> None:
    sys.path.insert(0, str(TOOLS))
    try:
        from corpus import is_heading, split_passages
    finally:
        sys.path.remove(str(TOOLS))
    headings = ["CHAPTER I", "Chapter 12 THE END", "IV.", "THE GOLDEN BIRD", "XII. A Walk", "3"]
    sentences = [
        "I held it to the light.",
        "He came in.",
        '"NO!"',
        "Chapter by chapter he read " * 9,
    ]
    assert all(is_heading(text) for text in headings)
    assert not any(is_heading(text) for text in sentences)
    body = "It was “so”—a_b_ line\nbroken by the page.\n\n" * 60
    [passage] = split_passages(f"CONTENTS\n\nCHAPTER I\n\n{body}\n\nTHE END\n\nshort")
    assert passage.startswith('It was "so"--ab line broken by the page.\n\nIt was')


def test_its_end_tokens_are_in_every_file() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["eos_token_id"] in generation["eos_token_id"]
    assert LLM().model.text_engine.engine.limits.eos_token_ids == set(generation["eos_token_id"])


def test_all_built_in_weights_together_are_under_22_mb_and_the_head_under_3() -> None:
    folders = [FOLDER.parent / name for name in BUILT_IN_MODELS]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < 22_000_000
    tensors = load_file(FOLDER / "model.safetensors")
    head = [tensor.nbytes for name, tensor in tensors.items() if name.startswith("mtp.")]
    assert 0 < sum(head) <= 3_000_000


def test_the_draft_model_shares_the_vocabulary_and_is_a_seventh_of_the_size() -> None:
    draft = FOLDER.parent / "pocket-draft"
    assert (draft / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (draft, FOLDER)]
    assert sizes[0] * 7 < sizes[1]
    assert LLM("pocket-draft").generate("Once upon a time")[0].text


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is localllm?", "language model"),
        ("hello", "hello|hi"),
        ("How do I leave?", "/exit"),
        ("Tell me a story about a fox.", "fox"),
        ("What is the capital of France?", "localllm chat qwen3"),
    ],
)
def test_it_answers_in_a_conversation(question: str, expected: str) -> None:
    session = ChatSession(LLM(max_num_seqs=1).model)
    completion, events = session.reply(question, SamplingParams(temperature=0, max_tokens=200))
    list(events)
    assert re.search(expected, completion.text, re.IGNORECASE)
    assert completion.finish_reason == "stop"


HELD_OUT = ("held_out.toml", "held_out_newcomers.toml")


def questions(*files: str) -> list[dict[str, object]]:
    return [
        {"topic": name, "question": text, "expects": topic["expects"]}
        for file in files or HELD_OUT
        for name, topic in tomllib.loads((TOOLS / file).read_text(encoding="utf-8")).items()
        for text in topic["questions"]
    ]


@pytest.mark.parametrize("one_of", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("file", "floor"), [(HELD_OUT[0], 0.9), (HELD_OUT[1], 0.85)])
def test_it_answers_wordings_that_it_was_not_trained_on(
    file: str, floor: float, one_of: int
) -> None:
    asked = questions(file)[::one_of]
    answers = LLM(max_num_seqs=8).chat(
        [[{"role": "user", "content": each["question"]}] for each in asked],
        SamplingParams(temperature=0, max_tokens=160),
    )
    right = sum(
        all(re.search(pattern, answer.text, re.IGNORECASE) for pattern in each["expects"])  # type: ignore[attr-defined]
        for each, answer in zip(asked, answers, strict=True)
    )
    assert right / len(asked) >= floor


def test_a_first_story_is_a_story() -> None:
    """As it is sampled by default; one of them was about quantization once."""
    llm = LLM(max_num_seqs=8)
    subjects = ("fox", "king", "dragon", "cat", "wizard", "robot", "princess", "owl")
    stories = llm.chat(
        [
            [{"role": "user", "content": request.format(subject)}]
            for subject in subjects
            for request in ("Tell me a story about a {}.", "tell me a short story about a {}")
        ],
        llm.sampling_params(seed=1),
    )
    told = [
        re.search("once|long ago|many years|in the old days", story.text, re.IGNORECASE) is not None
        and subjects[i // 2] in story.text
        for i, story in enumerate(stories)
    ]
    assert sum(told) >= len(told) - 1, [each.text[:80] for each in stories]


def test_the_held_out_questions_cover_every_topic_that_is_trained() -> None:
    held_out = {each["topic"] for each in questions()}
    trained = {
        name
        for path in (TOOLS / "knowledge").glob("*.toml")
        for name in tomllib.loads(path.read_text(encoding="utf-8"))
    }
    assert trained <= held_out
    assert all(name.startswith("story_") for name in held_out - trained)
    assert len(questions()) >= 150


def test_every_trained_answer_would_be_counted_as_right() -> None:
    expects = {each["topic"]: each["expects"] for each in questions()}
    topics = {
        name: topic
        for path in (TOOLS / "knowledge").glob("*.toml")
        for name, topic in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }
    for name, topic in topics.items():
        for answer in topics[topic.get("answered_by", name)]["answers"]:
            for pattern in expects[name]:  # type: ignore[attr-defined]
                assert re.search(pattern, answer, re.IGNORECASE), (name, pattern)


def test_the_generator_does_not_read_the_held_out_questions() -> None:
    for name in ("dialogues.py", "stories.py", "corpus.py", "train.py"):
        code = (TOOLS / name).read_text(encoding="utf-8")
        assert "import score" not in code, name
        assert "held_out_newcomers" not in code, name
        in_docstring = code.count('"""') >= 2 and "held_out.toml" in code.split('"""')[1]
        assert code.count("held_out.toml") == int(in_docstring), name


def test_the_same_seed_gives_the_same_rows_to_learn_from() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from dialogues import *\n"
        "from tokenizers import Tokenizer\n"
        "tokenizer = Tokenizer.from_file(sys.argv[2])\n"
        "rows = [dialogue_rows(read_topics(), tokenizer, (1, s), 2, 64) for s in (5, 5, 6)]\n"
        "assert (rows[0].ids == rows[1].ids).all() and (rows[0].ids != rows[2].ids).any()\n"
        "learnt = rows[0].targets != IGNORED\n"
        "assert (rows[0].ids[learnt] == rows[0].targets[learnt]).all() and learnt.any()\n"
        "text = tokenizer.decode(list(rows[0].ids[0]), skip_special_tokens=False)\n"
        "assert text.startswith('<|im_start|>')\n"
    )
    command = [sys.executable, "-c", code, str(TOOLS), str(FOLDER / "tokenizer.json")]
    subprocess.run(command, check=True)
