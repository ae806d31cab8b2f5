"""What the files of a reranker say: how it reads a question and a document, and what its score is.

Sources: the layout of sentence-transformers ("Creating Custom CrossEncoder Models"); the model card
of Qwen3-Reranker.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json_object
from localllm.files.model_file import has_file
from localllm.hub.sentence_modules import read_modules
from localllm.model.architecture import Architecture
from localllm.schedule.sampling_params import Pooling
from localllm.text.pair_prompt import QWEN3_ANSWERS, PairWriter
from localllm.text.tokenizer import Tokenizer

_SCORES = "LogitScore"


@dataclass(frozen=True, slots=True)
class Reranker:
    """Writes pairs, and reads scores from what `pooling` gives: the first value less the second one
    if there are two.
    """

    pairs: PairWriter
    pooling: Pooling
    is_reversed: bool = False

    def relevance(self, pooled: bytes) -> float:
        """0 to 1."""
        values = array("f", pooled)
        if self.is_reversed:
            values.reverse()
        score = values[0] - values[1] if len(values) > 1 else values[0]
        # Neither of the two overflows.
        return 1 / (1 + exp(-score)) if score >= 0 else exp(score) / (1 + exp(score))


def find_reranker(
    name: str, folder: Path, architecture: Architecture, tokenizer: Tokenizer
) -> Reranker | None:
    """How a checkpoint called `name` scores pairs; None if it is no reranker. Raises:
    CheckpointError.
    """
    modules = read_modules(folder)
    scores = next((each for each in modules if each.kind == _SCORES), None)
    is_qwen3 = architecture.name == "Qwen3ForCausalLM" and "reranker" in Path(name).name.lower()
    if architecture.num_labels in (1, 2):
        pooling = Pooling("labels")
    elif architecture.num_labels:
        return None
    elif scores is not None:
        pooling = _answers(folder / scores.path / "config.json")
    elif is_qwen3:
        vocabulary = tokenizer.vocabulary()
        if not all(each in vocabulary for each in QWEN3_ANSWERS):
            return None
        pooling = Pooling("logits", tuple(vocabulary[each] for each in QWEN3_ANSWERS))
    else:
        return None
    # Of two labels the second one is that of a match.
    return Reranker(_pairs(folder, tokenizer, is_qwen3), pooling, architecture.num_labels == 2)


def _answers(file: Path) -> Pooling:
    told = read_json_object(file)
    ids = [told.get("true_token_id"), told.get("false_token_id")]
    found = tuple(each for each in ids if each is not None)
    if ids[0] is None or not all(type(each) is int and each >= 0 for each in found):
        raise CheckpointError("true_token_id must be a token's id", where=str(file))
    return Pooling("logits", found)


def _pairs(folder: Path, tokenizer: Tokenizer, is_qwen3: bool) -> PairWriter:
    template = tokenizer.chat_template or ""
    if "document" in template and "query" in template:
        task, is_begun = _task(folder), _begins_answers(folder)
        return PairWriter(tokenizer, "template", task, is_begun)
    return PairWriter(tokenizer, "qwen3" if is_qwen3 else "plain", _task(folder))


def _task(folder: Path) -> str | None:
    """What is looked for, where a request does not say."""
    told = _read(folder / "config_sentence_transformers.json")
    prompts, name = told.get("prompts"), told.get("default_prompt_name")
    task = prompts.get(name) if isinstance(prompts, Mapping) else None
    return task if isinstance(task, str) and task else None


def _begins_answers(folder: Path) -> bool:
    told: Any = _read(folder / "sentence_bert_config.json")
    for name in ("processing_kwargs", "chat_template", "add_generation_prompt"):
        told = told.get(name) if isinstance(told, Mapping) else None
    return told is True


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if has_file(file) else {}
