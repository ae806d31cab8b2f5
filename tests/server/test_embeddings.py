"""`/v1/embeddings` through OpenAI's client, beside transformers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from server.conftest import Server, end, start_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from localllm.hub.checkpoint import open_checkpoint

TEXTS = ["a cat", "the king said to his sons", "a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding checkpoint: the model without its head, in the layout of sentence-transformers,
    with pocket's vocabulary.
    """
    whole, folder = (tmp_path_factory.mktemp("model") / name for name in ("whole", "embeds"))
    config = tiny_config("Qwen3ForCausalLM", vocab_size=6144, tie_word_embeddings=True)
    write_checkpoint(whole, config)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.model.save_pretrained(folder)
    config_file = folder / "config.json"
    told = json.loads(config_file.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    config_file.write_text(json.dumps(told))
    pocket = open_checkpoint().folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket / name, folder / name)
    kinds = {
        "": "models.Transformer",
        "1_Pooling": "models.Pooling",
        "2_Normalize": "models.Normalize",
    }
    modules = [
        {"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def embedder(server_home: Path, folder: Path) -> Iterator[Server]:
    flags = ("--served-model-name", "small", "--dtype", "float32")
    server = start_server(server_home, *flags, model=str(folder))
    yield server
    end(server)


def expected(folder: Path, text: str) -> np.ndarray:
    from transformers import AutoModel

    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        row = model(ids).last_hidden_state[0, -1].numpy()
    return np.asarray(row / np.linalg.norm(row))


def test_they_are_those_of_transformers(embedder: Server, folder: Path) -> None:
    found = embedder.client().embeddings.create(model="small", input=TEXTS)  # in base64
    assert [each.index for each in found.data] == [0, 1, 2]
    for each, text in zip(found.data, TEXTS, strict=True):
        np.testing.assert_allclose(each.embedding, expected(folder, text), atol=1e-5)
    assert found.data[0].embedding == found.data[2].embedding
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)


def test_fewer_dimensions_have_length_one_too(embedder: Server) -> None:
    client = embedder.client()
    whole = client.embeddings.create(model="small", input="a cat", encoding_format="float")
    few = client.embeddings.create(
        model="small", input="a cat", dimensions=8, encoding_format="float"
    )
    first = np.array(whole.data[0].embedding[:8])
    np.testing.assert_allclose(few.data[0].embedding, first / np.linalg.norm(first), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="small", input="a cat", dimensions=4096)


def test_the_same_server_answers_beside_them(embedder: Server) -> None:
    client = embedder.client()
    said = client.completions.create(model="small", prompt="a", max_tokens=3, temperature=0)
    client.embeddings.create(model="small", input="a")
    again = client.completions.create(model="small", prompt="a", max_tokens=3, temperature=0)
    assert again.choices[0].text == said.choices[0].text


def test_without_the_flag_there_are_none(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="--embeddings"):
        server.client().embeddings.create(model="pocket", input="a")


def test_another_pooling_is_told(server_home: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    pooling = {"pooling_mode_mean_tokens": True}
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(AssertionError, match="made by 'mean_tokens'"):
        start_server(server_home, model=str(tmp_path / "m"))


def test_what_is_wrong_with_a_text_is_told_of_its_field(embedder: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="empty") as caught:
        embedder.client().embeddings.create(model="small", input="")
    assert caught.value.param == "input"


def test_a_wrong_address_says_how_a_right_one_ends(embedder: Server) -> None:
    wrong = openai.OpenAI(base_url=embedder.url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="ends with /v1"):
        wrong.embeddings.create(model="small", input="a")
