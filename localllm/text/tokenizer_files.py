"""Reads the vocabulary of a checkpoint: `tokenizer.json`, and the tokens that other files add."""

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json_object
from localllm.text import added_tokens
from localllm.text.added_tokens import read_added_tokens
from localllm.text.tokenizer_check import check_decoding

FILE = "tokenizer.json"
# The files that decide which ids a text has.
FILES = (FILE, *added_tokens.FILES)
MAX_TOKENIZER_BYTES = 200_000_000


def load_backend(folder: Path, *, is_checked: bool = False) -> Backend:
    """The vocabulary of a folder; `is_checked`: it was read before, and did not change since.

    Raises: CheckpointError.
    """
    path = folder / FILE
    if not is_checked:
        check_decoding(read_json_object(path, MAX_TOKENIZER_BYTES), path)
    added = read_added_tokens(folder)
    try:
        backend = Backend.from_file(str(path))
        # Settings left behind by training; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, BPE):
            backend.model.dropout = None  # would encode a text differently each time
        added.add_to(backend)
        backend.encode("A probe: é 1", add_special_tokens=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception, and panics of its Rust side
        raise CheckpointError(
            f"tokenizer.json cannot be used: {error!s:.200}",
            where=str(path),
            hint="download the model again",
        ) from error
    return backend


def read_special_texts(folder: Path) -> dict[str, str]:
    """`bos_token` and the like by name, as a chat template reads them. Raises: CheckpointError."""
    return read_added_tokens(folder).texts
