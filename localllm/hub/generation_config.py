"""`generation_config.json`: the sampling that a model's makers recommend, and its end tokens.

A value that nobody can sample with, as conversions and trainers leave them behind, does not keep a
model from running: it is dropped, and a warning names it.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import RequestError
from localllm.files.json_file import read_json_object
from localllm.files.model_file import has_file
from localllm.model.config_fields import read_token_ids
from localllm.schedule.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

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
    "stop_strings": "stop",
}
# What would change the text and has no counterpart here, with the values that change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "top_h", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha"), (0,)),
    "guidance_scale": (1,),
    "token_healing": (False,),
    **dict.fromkeys(
        (
            *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
            *("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"),
            *("exponential_decay_length_penalty", "watermarking_config", "dola_layers"),
            *("constraints", "force_words_ids"),
        ),
        ([], {}),
    ),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields of SamplingParams that the checkpoint sets, and its end tokens."""

    sampling: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


def read_generation_config(folder: Path) -> GenerationDefaults:
    """The defaults of a checkpoint; a missing file is not an error.

    `do_sample: false` is greedy. What cannot be used is named in a warning. Raises: CheckpointError
    for a file that is not an object.
    """
    path = folder / FILE_NAME
    raw = read_json_object(path) if has_file(path) else {}
    sampling: dict[str, Any] = {"temperature": FALLBACK_TEMPERATURE}
    sampling.update(_usable(raw))
    if raw.get("do_sample") is False:
        sampling["temperature"] = 0.0
    for name, neutral in _WITHOUT_EFFECT.items():
        if raw.get(name) is not None and raw[name] not in neutral:
            logger.warning("%s: %s has no effect here", FILE_NAME, name)
    return GenerationDefaults(sampling, read_token_ids(raw.get("eos_token_id"), FILE_NAME))


def _usable(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of SamplingParams whose values it takes."""
    for name, field in _FIELDS.items():
        if raw.get(name) is None:
            continue
        try:
            SamplingParams(**{field: raw[name]})
        except RequestError as error:
            told = error.message.replace(field, name, 1)
            logger.warning("%s: %s; it is ignored", FILE_NAME, told)
        else:
            yield field, raw[name]
