"""The headers of the files that hold a checkpoint's tensors, safetensors or GGUF."""

from collections.abc import Sequence
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.model.gguf.tensors import is_gguf, read_gguf_infos
from localllm.model.safetensors_header import broken_file, read_header
from localllm.model.tensor_info import MAX_TENSORS, TensorInfo


def read_headers(files: Sequence[Path]) -> dict[str, TensorInfo]:
    """Tensors of all files of a checkpoint, by name; of a GGUF model by the loader's names.

    Raises: as `read_header` and `read_gguf_infos`; CheckpointError for a name in two files, and for
    too many tensors.
    """
    if files and is_gguf(files[0]):
        return read_gguf_infos(files[0])
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"tensor {name!r:.120} is in two files",
                    where=f"{found[name].file.name}, {file.name}",
                )
            found[name] = info
        if len(found) > MAX_TENSORS:
            raise broken_file(file, f"with this file the model has over {MAX_TENSORS:,} tensors")
    return found
