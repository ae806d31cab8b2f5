"""Models that Ollama has downloaded: manifests in JSON, by name, and blobs named by their hashes.

Source: `manifest/paths.go` and `types/model/name.go` of ollama. Nothing is written here: a blob may
be that of several names.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localllm.files.regular_file import read_regular
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stored_model import OLLAMA, StoredModel
from localllm.user.places import home_folder

# Where the service of Linux packages keeps its models, as a user of its own.
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", re.ASCII)
_DIGEST = re.compile("sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
_MAX_MANIFEST_BYTES, _MAX_LAYERS = 1_000_000, 10_000


def ollama_models(
    walk: StoreWalk, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[StoredModel]:
    """The models of Ollama that are one GGUF file each, and whose names are wanted; the manifests
    of others are not read.

    One with an adapter is left out: its file alone would be another model.
    """
    for root in _roots():
        for host in walk.folders(root / "manifests"):
            for namespace in walk.folders(host):
                for model in walk.folders(namespace):
                    for manifest in walk.files(model):
                        name = _name(host.name, namespace.name, model.name, manifest.name)
                        if name is not None and is_wanted(name):
                            yield from _read(name, manifest, root)


def _roots() -> list[Path]:
    chosen = os.environ.get("OLLAMA_MODELS")
    return [Path(chosen)] if chosen else [home_folder() / ".ollama" / "models", _SERVICE]


def _name(host: str, namespace: str, model: str, tag: str) -> str | None:
    """A name as Ollama shows it; None if it takes no such name."""
    if _HOST.fullmatch(host) is None or not all(map(_PART.fullmatch, (namespace, model, tag))):
        return None
    if host != _REGISTRY:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _LIBRARY else f"{namespace}/{model}:{tag}"


def _read(name: str, manifest: Path, root: Path) -> Iterator[StoredModel]:
    """The model of a manifest; none if that is broken, or it is no GGUF file that is whole."""
    layers = _layers(manifest)
    models = [layer for layer in layers if layer.get("mediaType") == f"{_LAYER}model"]
    if len(models) != 1 or any(each.get("mediaType") == f"{_LAYER}adapter" for each in layers):
        return
    digest = _DIGEST.fullmatch(str(models[0].get("digest")))
    if digest is None:
        return
    blob = root / "blobs" / f"sha256-{digest[1]}"
    try:
        num_bytes = blob.stat().st_size if blob.is_file() else -1
    except OSError:
        return
    if num_bytes == models[0].get("size"):
        yield StoredModel(name, blob, OLLAMA, num_bytes)


def _layers(manifest: Path) -> list[dict[str, Any]]:
    try:
        read = json.loads(read_regular(manifest, _MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    layers = read.get("layers") if isinstance(read, dict) else None
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        return []
    return [layer for layer in layers if isinstance(layer, dict)]
