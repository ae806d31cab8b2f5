"""What the files of an embedding checkpoint say, in the layout of sentence-transformers."""

from pathlib import Path

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json_object
from localllm.hub.sentence_modules import read_modules

_POOLING = "Pooling"
_HINT = "an embedding model of Qwen3, say"
# Besides the model and its pooling; embeddings have length 1 in any case.
_KNOWN = ("Transformer", _POOLING, "Normalize")


def is_for_embeddings(folder: Path) -> bool:
    """Whether a checkpoint was made for embeddings.

    Raises: CheckpointError for a pooling that does not take the last token, as other kinds need
    models that read in both directions, and for further layers.
    """
    modules = read_modules(folder)
    pooling = next((each for each in modules if each.kind == _POOLING), None)
    if pooling is None:
        return False
    other = next((each.kind for each in modules if each.kind not in _KNOWN), None)
    if other is not None:
        raise CheckpointError(
            f"its embeddings go through {other!r:.80}, which is not known",
            where=str(folder / "modules.json"),
            hint=_HINT,
        )
    file = folder / pooling.path / "config.json"
    mode = _mode(file)
    if mode != "lasttoken":
        raise CheckpointError(
            f"its embeddings are made by {mode!r:.80}; only those of the last token are known",
            where=str(file),
            hint=_HINT,
        )
    return True


def _mode(file: Path) -> str:
    """How rows become one: in new files under its name, in older ones the flag that is set."""
    told = read_json_object(file)
    mode = told.get("pooling_mode")
    if mode is not None:
        return str(mode)
    flags = [name for name, value in told.items() if value is True and "pooling_mode_" in name]
    return "+".join(name.removeprefix("pooling_mode_") for name in flags) or "mean"
