"""A tokenizer may have more ids than the model's head has rows, as Gemma 3 and fine-tunes do."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_config, write_checkpoint

from localllm import LLM
from localllm.answer.completion import Completion
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.grammar import Grammar

PICTURE, PADDING = "<image_soft_token>", "[PAD]"
NUM_ROWS = 259  # the tokens of the tokenizer; ids from here on have no row


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = tiny_config("Qwen3ForCausalLM", vocab_size=NUM_ROWS)
    folder = write_checkpoint(tmp_path_factory.mktemp("larger") / "model", config)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    state["added_tokens"] += [
        {"id": NUM_ROWS, "content": PICTURE, "special": True, **flags},
        {"id": NUM_ROWS + 1, "content": PADDING, "special": False, **flags},
    ]
    path.write_text(json.dumps(state))
    return LLM(str(folder), max_num_seqs=2)


def ids_of(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.samples[0].tokens]


def test_it_answers_and_never_with_such_a_token(larger: LLM) -> None:
    assert larger.model.tokenizer.num_token_ids == NUM_ROWS + 2
    [answer] = larger.generate(
        "hi", SamplingParams(temperature=100.0, max_tokens=64, ignore_eos=True)
    )
    ids = ids_of(answer)
    assert len(ids) == 64
    assert max(ids) < NUM_ROWS


def test_a_prompt_that_holds_such_a_token_is_refused_by_its_text(larger: LLM) -> None:
    few = SamplingParams(max_tokens=2)
    refused, beyond, typed = larger.generate(
        [f"a {PADDING} b", [5, 1 << 40], f"a {PICTURE} b"], few
    )
    assert refused.error is not None
    assert refused.error.message.startswith("the prompt holds '[PAD]', which is not among")
    assert refused.error.where == "token 260 of the tokenizer; the model has 0 to 258"
    assert beyond.error is not None
    assert "1099511627776 is out of range, the model has 0 to 258" in beyond.error.message
    assert typed.error is None  # a special token's text that a user typed is plain text


def test_a_form_is_followed_with_the_tokens_that_there_are(larger: LLM) -> None:
    form = Grammar("regex", r"(\[PAD\]|<image_soft_token>) [a-c]{3}")
    [answer] = larger.generate("hi", SamplingParams(max_tokens=40, grammar=form))
    assert answer.text[:-4] in (PADDING, PICTURE)
    assert max(ids_of(answer)) < NUM_ROWS


def test_end_tokens_that_the_model_does_not_have_are_dropped_with_a_warning(
    make_checkpoint: Callable[..., Path], edit_json: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", eos_token_id=[0, 288, -1])
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5000]}')
    llm = LLM(str(folder), max_num_seqs=1)
    assert llm.model.text_engine.engine.limits.eos_token_ids == {0, 2}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "not end tokens: 288, 5000, since the model has tokens 0 to 287" in warnings
