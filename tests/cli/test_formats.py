"""Answers in a form: JSON, a schema, an expression, a grammar; from the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import SCHEMAS

Run = Callable[..., Any]
ASK = ("chat", "pocket", "How is the weather?", "--seed", "3")


def test_an_answer_has_the_schema_of_a_file(localllm: Run, tmp_path: Path) -> None:
    schema = SCHEMAS["a weather report"]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    for given in (str(path), json.dumps(schema)):
        outcome = localllm(*ASK, "--json-schema", given)
        assert outcome.code == 0
        jsonschema.validate(json.loads(outcome.out), schema)


def test_an_answer_matches_an_expression_or_a_grammar(localllm: Run, tmp_path: Path) -> None:
    outcome = localllm(*ASK, "--regex", "(fine|wet), [0-9]{2} degrees")
    assert re.fullmatch("(fine|wet), [0-9]{2} degrees\n", outcome.out)
    path = tmp_path / "weather.lark"
    path.write_text('start: SKY " and " SKY\nSKY: "sun" | "rain"\n')
    outcome = localllm(*ASK, "--grammar", str(path), "--json")
    described = json.loads(outcome.out)
    assert re.fullmatch("(sun|rain) and (sun|rain)", described["text"])
    assert described["finish_reason"] == "stop"


def test_json_is_an_object_as_far_as_it_goes(localllm: Run) -> None:
    outcome = localllm(*ASK, "--format", "json", "-n", "8")
    assert isinstance(json.loads(outcome.out), dict)
    assert outcome.code == 0
    outcome = localllm(*ASK, "--format", "json", "-n", "1")
    assert outcome.out.startswith("{")
    assert outcome.code == 9


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--format", "yaml"), "--format must be json"),
        (("--format", "json", "--regex", "a"), "cannot be combined"),
        (("--regex", "(a"), "cannot be used"),
        (("--json-schema", '{"type": "x"}'), "cannot be used"),
        (("--json-schema", "{"), "not valid JSON"),
        (("--json-schema", "/nowhere"), "not a file"),
        (("--grammar", "/nowhere"), "not a file"),
    ],
)
def test_a_form_that_cannot_be_is_refused_before_the_model_is_opened(
    localllm: Run, flags: tuple[str, ...], said: str
) -> None:
    outcome = localllm("chat", "-m", "/no/such/model", "hi", *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_a_form_that_a_stop_string_cuts_is_told_as_such(localllm: Run) -> None:
    flags = (*ASK, "--regex", "one, two, three")
    cut = localllm(*flags, "--stop", ", t")
    assert (cut.code, cut.out) == (0, "one\n")
    assert "cut at the stop string ', t'; the answer is incomplete" in cut.err
    described = json.loads(localllm(*flags, "--stop", ", t", "--json").out)
    assert (described["finish_reason"], described["stop_string"]) == ("stop", ", t")
    whole = localllm(*flags, "--stop", "four")
    assert (whole.code, whole.out) == (0, "one, two, three\n")
    assert "cut" not in whole.err


def test_text_of_special_tokens_in_a_form_is_text(localllm: Run) -> None:
    outcome = localllm(*ASK, "--json-schema", '{"const": "a<|im_end|>b"}')
    assert (outcome.code, outcome.out) == (0, '"a<|im_end|>b"\n')


def test_a_form_that_would_be_compiled_for_ever_is_refused_at_once(localllm: Run) -> None:
    schema = '{"properties": {"a": {"type": "integer", "multipleOf": 215656441}}}'
    outcome = localllm(*ASK, "--json-schema", schema)
    assert (outcome.code, outcome.out) == (2, "")
    assert "multipleOf is too large (215656441)" in outcome.err
