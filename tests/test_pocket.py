"""The built-in model is what its card says, and has learnt something."""

import json
import math
import re
import sys
from math import prod
from pathlib import Path

import localllm
from localllm import LLM
from localllm.model.architectures import expected_tensors, read_model_config
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import check_weights

FOLDER = Path(localllm.__file__).parent / "pocket"
TOOLS = Path(__file__).parents[1] / "tools" / "pocket"
# From "The Time Machine", which it was not trained on.
UNSEEN = (
    "The Time Traveller (for so it will be convenient to speak of him) was expounding a recondite "
    "matter to us. His pale grey eyes shone and twinkled, and his usually pale face was flushed "
    "and animated. The fire burnt brightly, and the soft radiance of the incandescent lights in "
    "the lilies of silver caught the bubbles that flashed and passed in our glasses."
)


def test_its_sizes_are_within_the_limits_it_was_made_for() -> None:
    config, spec = read_model_config(FOLDER)
    shapes = expected_tensors(config, spec)
    assert sum(prod(shape) for shape in shapes.values()) <= 9_000_000
    assert 4096 <= config.vocab_size <= 8192
    assert config.max_position_embeddings == 2048
    assert config.num_kv_heads < config.num_heads
    assert spec.qk_norm
    assert config.tie_word_embeddings
    for name, shape in shapes.items():
        if len(shape) == 2:
            assert shape[1] % 64 == 0, name
    check_weights(find_weight_files(FOLDER), config, spec)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 20_000_000


def test_unseen_english_is_far_likelier_than_chance() -> None:
    llm = LLM(max_num_seqs=1)
    ids = llm.model.text_prompt(UNSEEN).token_ids
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
    config, spec = read_model_config(FOLDER)
    assert parameters == sum(prod(shape) for shape in expected_tensors(config, spec).values())


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


def test_its_end_token_is_in_every_file() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [config["eos_token_id"]]
