"""lm-evaluation-harness against the server, and against transformers.

It is no part of the tests' own packages: `pip install 'lm_eval[api,hf]'`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published.conftest import run
from server.conftest import Server, end, start_server

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api,hf]'")

FACTS = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid"]),
    ("The capital of Italy is", ["Rome", "Oslo", "Lisbon"]),
    ("Water freezes at zero degrees", ["Celsius", "Kelvin", "of longitude"]),
    ("The opposite of hot is", ["cold", "warm", "tall"]),
    ("A week has seven", ["days", "hours", "colours"]),
    ("Cats like to chase", ["mice", "opinions", "continents"]),
    ("Two plus two is", ["four", "nine", "purple"]),
    ("The sun rises in the", ["east", "west", "north"]),
]
PASSAGES = [
    "The lighthouse stood at the end of the pier, and every evening its keeper climbed the stairs.",
    "A cache keeps what was computed before, so that the same question is answered at once.",
    "She folded the letter, put it into the drawer, and never spoke of it again.",
]


@pytest.fixture(scope="module")
def server(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, in which both compute the same numbers."""
    flags = ("--dtype", "float32", "--ctx", "1024", "--max-num-seqs", "8")
    server = start_server(tmp_path_factory.mktemp("home"), *flags, model=str(smollm))
    yield server
    end(server)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Likelihoods of choices and of whole texts, and greedy answers, all of local files."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def task(name: str, rows: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
        local = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        return {"task": name, **local, **config}

    facts = [{"question": question, "choices": choices} for question, choices in FACTS]
    choose = task(
        "choose",
        facts,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target=0,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    read = task(
        "read",
        [{"passage": passage} for passage in PASSAGES],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{passage}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )
    say = task(
        "say",
        facts,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{choices[0]}}",
        generation_kwargs={"until": ["\n", "."], "max_gen_toks": 16, "temperature": 0.0},
        metric_list=[{"metric": "exact_match", "ignore_case": True}],
    )
    return [choose, read, say]


def evaluate(
    model: str, tasks: list[Any], arguments: dict[str, Any], *, is_chat: bool = False
) -> dict[str, Any]:
    """What the harness finds: each task's figures, and each question's responses."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=is_chat,
    )
    return {
        name: (
            {k: v for k, v in figures.items() if isinstance(v, float)},
            [sample["resps"] for sample in found["samples"][name]],
        )
        for name, figures in found["results"].items()
    }


def test_completions_give_the_figures_of_transformers(
    server: Server, smollm: Path, tasks: list[Any]
) -> None:
    expected = evaluate("hf", tasks, transformers(smollm))
    url = f"{server.url}/v1/completions"
    asked = {"model": served(server), "base_url": url, "tokenizer": str(smollm)}
    found = evaluate("local-completions", tasks, {**asked, "max_length": 1024, "num_concurrent": 4})
    for name, (figures, _) in expected.items():
        assert found[name][0] == pytest.approx(figures, rel=1e-4), name
    assert found["say"][1] == expected["say"][1]
    for ours, theirs in zip(found["choose"][1], expected["choose"][1], strict=True):
        assert [nats for [(nats, _)] in ours] == pytest.approx(
            [nats for [(nats, _)] in theirs], abs=1e-3
        )


def test_chat_completions_answer_as_transformers(
    server: Server, smollm: Path, tasks: list[Any]
) -> None:
    say = tasks[2:]
    url = f"{server.url}/v1/chat/completions"
    asked = {"model": served(server), "base_url": url}
    found = evaluate("local-chat-completions", say, asked, is_chat=True)
    assert found == evaluate("hf", say, transformers(smollm), is_chat=True)


def test_eval_finds_the_same_perplexity(smollm: Path, tasks: list[Any], tmp_path: Path) -> None:
    first, rest = PASSAGES[0].split(" ", 1)  # a token, and all that is scored
    text = tmp_path / "text.txt"
    text.write_text(PASSAGES[0])
    ours = run("eval", str(smollm), "--text", str(text), "--dtype", "float32")
    rows = {"doc_to_text": first, "doc_to_target": f" {rest}", "output_type": "loglikelihood"}
    task = {**tasks[1], "task": "rest", "metric_list": [{"metric": "perplexity"}], **rows}
    [[(nats, _)]] = evaluate("hf", [task], transformers(smollm))["rest"][1][0]
    assert ours["perplexity"] == pytest.approx(math.exp(-nats / ours["tokens"]), rel=1e-4)


def served(server: Server) -> str:
    """The name of the model."""
    [model] = server.client().models.list().data
    return model.id


def transformers(folder: Path) -> dict[str, Any]:
    """The harness's arguments for the reference."""
    return {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
