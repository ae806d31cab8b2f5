"""The codings of a model's keys in 4 bits, kept on disk: finding them takes seconds."""

import hashlib
import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from localllm.engine import key_codings
from localllm.engine.key_codings import find_codings, plain_codings
from localllm.files.private_files import private_folder, read_private, write_private
from localllm.model.decoder import DecoderModel
from localllm.operators.listener import Listener
from localllm.user.places import cache_folder
from localllm_kernels.attention.four_bits import KeyCoding
from localllm_kernels.compiling.fingerprint import sources_fingerprint

logger = logging.getLogger(__name__)

FOLDER = "key-codings"
_MAX_BYTES = 1 << 30
_WITHOUT = "how keys become 4-bit codes is found at every start"
_PARTS = ("means", "factors", "feedback")


def kept_codings(model: DecoderModel, weights_id: str, listener: Listener) -> tuple[KeyCoding, ...]:
    """Those of `find_codings` for the model whose weights `weights_id` stands for, found once."""
    made_by = (
        weights_id,
        sources_fingerprint(),
        hashlib.sha256(Path(key_codings.__file__).read_bytes()).hexdigest(),
        model.embedding.row_dtype,
        model.ropes.num_positions,
    )
    digest = hashlib.sha256(" ".join(map(str, made_by)).encode()).hexdigest()
    folder = private_folder(cache_folder(FOLDER), _WITHOUT)
    path = None if folder is None else folder / f"{digest[:24]}.safetensors"
    codings = None if path is None else _read(path, plain_codings(model))
    if codings is not None:
        return codings
    listener.line("keys in 4 bits: the model writes some text, to which their codes are fitted")
    codings = find_codings(model)
    if path is not None:
        tensors = {
            f"{i}.{name}": getattr(coding, name).cpu().contiguous()
            for i, coding in enumerate(codings)
            for name in _PARTS
        }
        try:
            write_private(path, save(tensors))
        except OSError as error:
            logger.warning("%s: %s", _WITHOUT, error)
    return codings


def _read(path: Path, like: tuple[KeyCoding, ...]) -> tuple[KeyCoding, ...] | None:
    """The codings in a file, which have the shapes of `like`; None if it cannot be used."""
    try:
        found = load(read_private(path, _MAX_BYTES))
        codings = []
        for i, plain in enumerate(like):
            parts = [found[f"{i}.{name}"] for name in _PARTS]
            for name, part in zip(_PARTS, parts, strict=True):
                expected = getattr(plain, name)
                if part.shape != expected.shape or part.dtype != expected.dtype:
                    raise ValueError(f"{i}.{name} has the shape {tuple(part.shape)}")
                if not part.isfinite().all():
                    raise ValueError(f"{i}.{name} is not finite")
            codings.append(KeyCoding(*parts).to(plain.means.device))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        logger.warning("%s is not used and will be rewritten: %s", path, error)
        return None
    return tuple(codings)
