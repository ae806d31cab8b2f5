"""The suites of drafts: given texts at the model's own speed, and differences that are found."""

import random
import timeit
from array import array

import pytest

from localllm.bench.scripted import ScriptedRunner
from localllm.bench.speculation import (
    SpeculationSuite,
    make_scripts,
    measure_index,
    run_script,
)
from localllm.bench.subject import Subject, open_subject
from localllm.bench.texts import copying_texts, prose
from localllm.bench.verify import VerifySuite, describe, differences, run_together
from localllm.engine.config import EngineConfig
from localllm.schedule.logprobs import TokenLogprobs
from localllm.schedule.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_subject(None, EngineConfig(max_num_seqs=8), 1000)


def test_a_model_says_what_it_is_told(subject: Subject) -> None:
    scripts = {0: [5, 6, 7, 8], 1: [9, 10]}
    engine = subject.engine.beside(wrap=lambda runner: ScriptedRunner(runner, scripts))
    said: dict[int, list[int | None]] = {0: [], 1: []}
    for answer in scripts.values():
        params = SamplingParams(temperature=1.0, max_tokens=len(answer), ignore_eos=True)
        engine.add_request([1, 2, 3], params)
    while engine.has_unfinished():
        for event in engine.step():
            said[event.request_id].append(event.token_id)
    assert said == scripts


def test_drafts_save_steps_on_text_that_repeats(subject: Subject) -> None:
    assert subject.speculator is not None
    for script in make_scripts(subject, 20, seed=0, num_prompt=100):
        plain = run_script(subject.engine, None, script, 2)
        assert (plain.num_steps, plain.num_drafted, plain.num_accepted) == (19, 0, 0)
    edit = make_scripts(subject, 60, seed=0)[0]
    # Several, since what is drafted rests on measured times, which a busy machine disturbs.
    for _ in range(5):
        drafting = run_script(subject.engine, subject.speculator.renewed(), edit, 1)
        assert drafting.num_steps == drafting.num_tokens - drafting.num_accepted
        if drafting.num_accepted > 10:
            break
    assert drafting.num_accepted > 10


@pytest.mark.parametrize(
    ("batches", "num_tokens", "num_prompt"),
    [((2,), 3, 20), pytest.param((1, 2), 30, 700, marks=pytest.mark.slow)],
)
def test_the_suite_tells_tokens_a_step_and_what_was_accepted(
    subject: Subject, batches: tuple[int, ...], num_tokens: int, num_prompt: int
) -> None:
    suite = SpeculationSuite(subject, batches, num_tokens, 1, seed=0, num_prompt=num_prompt)
    suite.run(lambda what: None)
    index, *rows = suite.results()
    assert index.suite == "suffix index"
    assert index.found["bytes"] < 200e6
    assert [row.conditions["batch"] for row in rows] == [b for b in batches for _ in range(21)]
    assert {row.conditions["drafters"] for row in rows} == {
        "n-grams",
        "head",
        "n-grams, head",
    }
    assert {row.test for row in rows} >= {"edit this file", "prose", "random tokens"}
    for row in rows:
        assert row.found["tokens_per_step"] >= 1
        assert 0 <= row.found["accepted"] <= 1


@pytest.mark.alone
def test_a_token_is_looked_up_in_the_time_of_reading_some_hundred_places() -> None:
    found = measure_index(seed=0)
    rng = random.Random(0)
    nexts = array("i", rng.sample(range(1 << 18), 1 << 18))

    def walk() -> None:
        at = 0
        for _ in range(10_000):
            at = nexts[at]

    place_s = min(timeit.repeat(walk, number=1, repeat=99)) / 10_000
    # A look-up tries 64 places, and reads two numbers of each. All places would be 240.
    assert found.found["look_up_s"].min < 1000 * place_s


@pytest.mark.slow
def test_texts_are_of_several_kinds() -> None:
    for text in (*copying_texts(), prose()):
        assert len(text.prompt) > 1000
        assert len(text.answer) > 1000
        assert text.answer not in text.prompt


@pytest.mark.slow
def test_verify_finds_the_same_text_in_every_way(subject: Subject) -> None:
    suite = VerifySuite(subject, 5, seed=0)
    suite.run(lambda what: None)
    rows = suite.results()
    assert [row.test for row in rows] == [
        "drafts: n-grams",
        "drafts: head",
        "drafts: n-grams, head",
        "from a warm cache",
        "prompts in chunks",
        "in one batch",
        "all combined",
    ]
    assert all(row.found["identical"] for row in rows), [row.verdict for row in rows]


def test_a_difference_is_told_with_both_gaps(subject: Subject) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=20)
    [plain] = run_together(subject.engine, [([1, 2, 3], params)])
    [again] = run_together(subject.engine, [([1, 2, 3], params)])
    assert differences([plain], [again]) == []
    assert plain[2].logprobs is not None
    other_id = next(token for token, _ in plain[2].logprobs.top if token != plain[2].token_id)
    own = dict(plain[2].logprobs.top)
    top = ((other_id, -1.0), (plain[2].token_id or 0, -1.5))
    changed = plain[2]._replace(token_id=other_id, logprobs=TokenLogprobs(-1.0, top))
    [found] = differences([plain], [[*plain[:2], changed, *plain[3:]]])
    assert (found.prompt, found.position) == (0, 2)
    assert found.tokens == (plain[2].token_id, other_id)
    assert found.gaps[0] == pytest.approx(plain[2].logprobs.logprob - own[other_id])
    assert found.gaps[1] == pytest.approx(0.5)
    assert describe([found], 1, None).startswith("1 of 1 differ; prompt 0 at token 2")
