"""`generation_config.json`: the sampling that a model's makers recommend, and its end tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.engine.sampling_params import SamplingParams
from localllm.errors import CheckpointError, RequestError
from localllm.files.json_file import read_json_object
from localllm.files.model_file import has_file
from localllm.model.config_fields import read_token_ids

FILE_NAME = "generation_config.json"
# For a checkpoint that sets no temperature: moderate, since greedy sampling loops on small models.
FALLBACK_TEMPERATURE = 0.7
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields of SamplingParams that the checkpoint sets, and its end tokens."""

    sampling: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


def read_generation_config(folder: Path) -> GenerationDefaults:
    """The defaults of a checkpoint; a missing file is not an error.

    `do_sample: false` is greedy. Raises: CheckpointError for values out of range.
    """
    path = folder / FILE_NAME
    raw = read_json_object(path) if has_file(path) else {}
    sampling: dict[str, Any] = {"temperature": FALLBACK_TEMPERATURE}
    for name, field in _FIELDS.items():
        if raw.get(name) is not None:
            sampling[field] = raw[name]
    if raw.get("do_sample") is False:
        sampling["temperature"] = 0.0
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise CheckpointError(
            f"{FILE_NAME}: {error.message}", where=str(path), hint="download the model again"
        ) from error
    return GenerationDefaults(
        sampling, read_token_ids(raw.get("eos_token_id"), f"{path}: eos_token_id")
    )
