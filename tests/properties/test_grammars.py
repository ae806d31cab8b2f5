"""The exactness contract with grammars: the same tokens in any company, and all of them allowed."""

import re
from dataclasses import replace

from engines import Limits, match_bytes, run
from hypothesis import strategies as st
from properties.test_drafts import speculator_of
from properties.test_exactness import (
    Request,
    assert_same_as_alone,
    engine_of,
    models,
    prompts,
    requests,
)
from seeds import drawn

from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.grammar import Grammar

# With pieces that leave no choice, pieces that leave many, and ends that are open or not.
EXPRESSIONS = [
    r"(yes|no), (certainly|perhaps)\.",
    r"\{\"name\": \"[a-z]{1,4}\", \"size\": [0-9]{1,3}\}",
    r"(ab|cd)+x?",
    r"[0-9]{3}-[0-9]{4}",
    r"(the same thing, ){2}[^x]*",
]
constrained = st.builds(
    lambda expression, temperature, seed, num, ignores, penalty, n: SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=num,
        ignore_eos=ignores,
        frequency_penalty=penalty,
        n=n,
        grammar=Grammar("regex", expression),
    ),
    st.sampled_from(EXPRESSIONS),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.integers(0, 1 << 40),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1, 1, 2]),
)
constrained_requests = st.lists(st.tuples(prompts, constrained), min_size=1, max_size=4)


@drawn(
    16,
    80,
    models,
    constrained_requests,
    requests.map(lambda plain: plain[:2]),
    st.sampled_from([None, "ngram", "oracle", "another model", "the same model"]),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 20),
    st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([4, 16]),
            "max_num_seqs": st.integers(1, 24),
            "max_num_batched_tokens": st.integers(1, 120),
            "enable_prefix_caching": st.booleans(),
            "overlaps": st.booleans(),
        }
    ),
    st.integers(0, 60),
)
def test_an_answer_in_a_grammar_is_the_same_in_any_company(
    model_name: str,
    within: list[Request],
    plain: list[Request],
    kind: str | None,
    error_rate: float,
    max_draft: int,
    sizes: dict[str, int],
    spare_blocks: int,
) -> None:
    wanted = within + plain
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    limits = Limits(
        num_blocks=-(-longest // sizes["block_size"]) + spare_blocks,
        **sizes,  # type: ignore[arg-type]
    )
    if kind is not None:
        new = speculator_of(kind, model_name, wanted, error_rate, max_draft, limits)
        limits = replace(limits, speculator=new)
    answers = run(engine_of(model_name, limits), wanted)
    assert_same_as_alone(model_name, wanted, answers)
    for (i, _), answer in answers.items():
        grammar = wanted[i][1].grammar
        if grammar is not None:
            ids = [token for token in answer.token_ids if token > 2]
            assert match_bytes(grammar).count_allowed(ids) == len(ids)
            if answer.finish_reason is FinishReason.STOP:
                text = bytes(token - 3 for token in ids).decode(errors="replace")
                assert re.fullmatch(grammar.source, text), text
