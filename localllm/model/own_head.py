"""Whether a checkpoint that calls its embeddings tied has an output head of its own all the same.

Then it is not tied, as in transformers (`tie_weights` compares both). Towers are saved like that.
"""

from pathlib import Path

from localllm.errors import CheckpointError
from localllm.model.architecture import EMBEDDING, HEAD, Architecture
from localllm.model.mapped_file import MappedFile
from localllm.model.stored_names import own_tensors
from localllm.model.tensor_files import read_headers
from localllm.model.tensor_info import TensorInfo
from localllm.model.weight_files import find_weight_files

# Compared at once, so that heads that differ are read no further.
_ROWS = 4096


def has_other_head(folder: Path, architecture: Architecture) -> bool:
    """Whether the files hold an output head that is not equal to the embedding table; False where
    there are no files yet, or broken ones, which are refused when they are checked.
    """
    try:
        found = read_headers(find_weight_files(folder))
    except CheckpointError:
        return False
    found = own_tensors(found, architecture)
    head, table = found.get(f"{HEAD}.weight"), found.get(EMBEDDING)
    if head is None or table is None or (head.dtype, head.shape) != (table.dtype, table.shape):
        return False
    return differ(head, table)


def differ(head: TensorInfo, table: TensorInfo) -> bool:
    """Whether two tensors of the same type and shape in files hold other values."""
    import torch  # a config is read without it

    own, other = (each.read(MappedFile(each.file).bytes) for each in (head, table))
    return any(
        not torch.equal(own[row : row + _ROWS], other[row : row + _ROWS])
        for row in range(0, head.shape[0], _ROWS)
    )
