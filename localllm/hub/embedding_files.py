"""What the files of an embedding checkpoint say, in the layout of sentence-transformers."""

from pathlib import Path

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json_object

_POOLING = Path("1_Pooling") / "config.json"


def is_for_embeddings(folder: Path) -> bool:
    """Whether a checkpoint was made for embeddings.

    Raises: CheckpointError for a pooling that does not take the last token, as other kinds need
    models that read in both directions.
    """
    if not (folder / "modules.json").exists():
        return False
    if not (folder / _POOLING).exists():
        return True
    pooling = read_json_object(folder / _POOLING)
    modes = [name for name, value in pooling.items() if value is True and "pooling_mode" in name]
    if modes and modes != ["pooling_mode_lasttoken"]:
        raise CheckpointError(
            f"its embeddings are made by {modes[0]}; only those of the last token are known",
            where=str(folder / _POOLING),
            hint="an embedding model of Qwen3, say",
        )
    return True
