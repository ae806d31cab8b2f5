"""A model found by name, its small files read and checked, before anything is loaded."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.catalog import BUILT_IN_MODEL, BUILT_IN_MODELS, resolve_model
from localllm.config import EngineConfig, ModelConfig
from localllm.download import DownloadProgress, fetch_model
from localllm.errors import CheckpointError
from localllm.file_times import note_use
from localllm.generation_config import GenerationDefaults, read_generation_config
from localllm.model.architectures import ArchSpec, read_model_config
from localllm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder whose small files are read and checked; the weights are not touched yet.

    `engine_config` is what was asked for, with what the model itself decides filled in; `open_s` is
    what all that took.
    """

    name: str
    folder: Path
    model_config: ModelConfig
    spec: ArchSpec
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    eos_token_ids: frozenset[int]
    engine_config: EngineConfig
    open_s: float


def open_checkpoint(
    name: str | None = None,
    config: EngineConfig | None = None,
    progress: DownloadProgress | None = None,
) -> Checkpoint:
    """Find, fetch if need be, and check a model; None is the built-in one. `progress` is told of a
    download.

    Raises: CatalogError, DownloadError, CheckpointError, UnsupportedModelError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    source = resolve_model(name or BUILT_IN_MODEL)
    if source.name in BUILT_IN_MODELS and config.dtype == "auto":
        # So that the exactness contract holds as it comes; see docs/architecture.md.
        config = replace(config, dtype="float32")
    folder = fetch_model(source, progress=progress)
    model_config, spec = read_model_config(folder)
    note_use(folder)
    defaults = read_generation_config(folder)
    tokenizer = Tokenizer.from_folder(folder, source.chat_template)
    # Every place that names an end token counts; they need not agree.
    eos = {*defaults.eos_token_ids, *model_config.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    _check_vocabulary(folder, tokenizer, model_config.vocab_size, eos)
    return Checkpoint(
        name=source.name,
        folder=folder,
        model_config=model_config,
        spec=spec,
        tokenizer=tokenizer,
        defaults=defaults,
        eos_token_ids=frozenset(eos),
        engine_config=config,
        open_s=time.monotonic() - started,
    )


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int, eos: set[int]) -> None:
    """The head may be larger than the tokenizer (padding), never smaller."""
    if tokenizer.num_token_ids > vocab_size:
        raise CheckpointError(
            f"the tokenizer has token ids up to {tokenizer.num_token_ids - 1}, "
            f"the model's head only {vocab_size} rows",
            where=str(folder),
            hint="tokenizer.json and config.json are of different models or revisions",
        )
    for token_id in sorted(eos):
        if token_id >= vocab_size:
            raise CheckpointError(
                f"end token {token_id} is none of the model's 0 to {vocab_size - 1}",
                where=str(folder / "generation_config.json"),
                hint="the config files are of different models or revisions",
            )
