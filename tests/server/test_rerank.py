"""`/v1/rerank` with each kind of reranker, beside transformers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from server.conftest import Server, end, start_server
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from localllm.hub.checkpoint import open_checkpoint

VOCAB_SIZE = 6160
QUERY = "What does a cat eat?"
DOCUMENTS = ["The king said to his sons that he would go.", "A cat eats mice.", "mice <|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>answer\n{% endif %}"
)
# Its text says which roles it knows, as published ones do.
ROLES = "{# roles: system, query, document #}"
FLAGS = ("--served-model-name", "small", "--dtype", "float32")


def with_tokenizer(folder: Path) -> None:
    """Pocket's vocabulary, with the word "yes" as a token."""
    pocket = open_checkpoint().folder
    shutil.copy(pocket / "tokenizer_config.json", folder / "tokenizer_config.json")
    told = json.loads((pocket / "tokenizer.json").read_text())
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    word = {"id": 6150, "content": "yes", **dict.fromkeys(flags, False)}
    told["added_tokens"].append(word)
    (folder / "tokenizer.json").write_text(json.dumps(told))


def write_model(folder: Path, **changes: Any) -> None:
    config = tiny_config("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, **changes)
    write_checkpoint(folder, config)
    with_tokenizer(folder)


def write_scorer(folder: Path, num_labels: int) -> None:
    """A model with a head for scores, as transformers saves it."""
    told = tiny_config("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, pad_token_id=0)
    torch.manual_seed(7)
    model = Qwen3ForSequenceClassification(Qwen3Config(**told, num_labels=num_labels))
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    with_tokenizer(folder)


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of the last token, by transformers."""
    is_scorer = "Sequence" in (folder / "config.json").read_text()
    kind: Any = Qwen3ForSequenceClassification if is_scorer else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0]
    return found if is_scorer else found[-1]


def served(home: Path, folder: Path) -> Iterator[Server]:
    server = start_server(home, *FLAGS, model=str(folder))
    yield server
    end(server)


def ask(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": "small", "query": QUERY, "documents": DOCUMENTS, **fields}
    return httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60)


def by_place(response: httpx.Response) -> list[float]:
    response.raise_for_status()
    found = {each["index"]: each["relevance_score"] for each in response.json()["results"]}
    return [found[place] for place in sorted(found)]


@pytest.fixture(scope="module", params=[1, 2])
def scorer(
    request: pytest.FixtureRequest, server_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("model") / "scorer"
    write_scorer(folder, request.param)
    for server in served(server_home, folder):
        yield server, folder


def test_a_head_for_scores_gives_those_of_transformers(scorer: tuple[Server, Path]) -> None:
    server, folder = scorer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in DOCUMENTS:
        found = logits(folder, tokenizer(QUERY + text)["input_ids"])
        expected.append(torch.sigmoid(found[0]) if len(found) == 1 else found.softmax(0)[1])
    np.testing.assert_allclose(by_place(ask(server)), expected, atol=1e-5)


def test_such_a_model_writes_no_text(scorer: tuple[Server, Path]) -> None:
    body = {"model": "small", "prompt": "a", "max_tokens": 2}
    refused = httpx.post(f"{scorer[0].url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert "writes no text" in refused.text
    assert "/v1/rerank" in refused.text


@pytest.fixture(scope="module")
def qwen(
    server_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A model that is known as a reranker by its name alone."""
    folder = tmp_path_factory.mktemp("model") / "Tiny-Reranker"
    write_model(folder)
    for server in served(server_home, folder):
        yield server, folder


def qwen_score(folder: Path, query: str, document: str, task: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The words of the model card, written out once more.
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (before, text, after) for token in tokenizer(part)["input_ids"]]
    yes, no = (tokenizer.convert_tokens_to_ids(each) for each in ("yes", "no"))
    found = logits(folder, ids)
    return float(torch.sigmoid(found[yes] - found[no]))


def test_a_model_that_answers_yes_or_no(qwen: tuple[Server, Path]) -> None:
    server, folder = qwen
    task = "Given a web search query, retrieve relevant passages that answer the query"
    plain = DOCUMENTS[:2]
    expected = [qwen_score(folder, QUERY, each, task) for each in plain]
    np.testing.assert_allclose(by_place(ask(server, documents=plain)), expected, atol=1e-5)
    own = [qwen_score(folder, QUERY, each, "Find food.") for each in plain]
    found = by_place(ask(server, documents=plain, instruction="Find food."))
    np.testing.assert_allclose(found, own, atol=1e-5)
    assert found != expected


def test_the_best_one_is_first(qwen: tuple[Server, Path]) -> None:
    whole = ask(qwen[0], return_documents=True).json()
    scores = [each["relevance_score"] for each in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(DOCUMENTS)
    for each in whole["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 100
    best = ask(qwen[0], top_n=1).json()["results"]
    first = whole["results"][0]
    assert best == [{name: first[name] for name in ("index", "relevance_score")}]


def test_scores_do_not_depend_on_other_documents(qwen: tuple[Server, Path]) -> None:
    together = by_place(ask(qwen[0]))
    alone = [by_place(ask(qwen[0], documents=[each]))[0] for each in DOCUMENTS]
    objects = by_place(ask(qwen[0], documents=[{"text": each} for each in DOCUMENTS]))
    assert together == alone == objects


def test_a_long_document_is_cut_where_it_is_asked_for(qwen: tuple[Server, Path]) -> None:
    long = "A cat eats mice. " * 100
    refused = ask(qwen[0], documents=[long])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "documents"
    cut = by_place(ask(qwen[0], documents=[long, "A cat"], max_tokens_per_doc=2))
    assert cut[0] == cut[1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"documents": []}, "list of texts"),
        ({"documents": [1]}, "a document must be"),
        ({"documents": ["a"] * 2049}, "at most 2048"),
        ({"top_n": 0}, "top_n"),
        ({"query": None}, "query"),
        ({"model": "other"}, "not served"),
    ],
)
def test_bad_bodies_are_told(qwen: tuple[Server, Path], wrong: dict[str, Any], said: str) -> None:
    refused = ask(qwen[0], **wrong)
    assert refused.status_code in (400, 404)
    assert said in refused.text


def test_other_models_are_no_rerankers(server: Server) -> None:
    body = {"query": "a", "documents": ["b"]}
    refused = httpx.post(f"{server.url}/v1/rerank", json=body)
    assert refused.status_code == 400
    assert "not a reranker" in refused.text


@pytest.mark.parametrize("false_id", [1454, None])
def test_a_template_that_knows_the_roles(
    server_home: Path, tmp_path: Path, false_id: int | None
) -> None:
    folder = tmp_path / "m"
    write_model(folder)
    (folder / "chat_template.jinja").write_text(ROLES + TEMPLATE)
    name = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.X"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": name},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    answers = {"true_token_id": 1738, "false_token_id": false_id}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(answers))
    prompts = {"prompts": {"web": "Find it."}, "default_prompt_name": "web"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    if false_id is None:
        told = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
        (folder / "sentence_bert_config.json").write_text(json.dumps(told))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in DOCUMENTS[:2]:
        messages = [
            {"role": "system", "content": "Find it."},
            {"role": "query", "content": QUERY},
            {"role": "document", "content": text},
        ]
        written = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=false_id is None
        )
        found = logits(folder, tokenizer(written)["input_ids"])
        score = found[1738] if false_id is None else found[1738] - found[false_id]
        expected.append(float(torch.sigmoid(score)))
    for server in served(server_home, folder):
        found = by_place(ask(server, documents=DOCUMENTS[:2]))
    np.testing.assert_allclose(found, expected, atol=1e-5)
