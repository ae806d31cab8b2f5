"""A GGUF model that lies in a store: that of another program, or the hub's cache."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.hub.quantized_files import label_of, models_among, stem_of, tag_of

OLLAMA, LM_STUDIO, LLAMA_CPP = "Ollama", "LM Studio", "llama.cpp"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that the program `program` has downloaded, under the name that it is asked for.

    `file` is the first of its files, `num_bytes` are those of all of them.
    """

    name: str
    file: Path
    program: str
    num_bytes: int

    @property
    def format(self) -> str:
        """How its weights are stored, as far as names tell."""
        label = label_of(self.name) or label_of(self.file.name)
        return "GGUF" if label is None else f"GGUF {label}"


def stored_models(
    base: str, folder: Path, sizes: Mapping[str, int], program: str
) -> list[StoredModel]:
    """The models among the files of a folder, each named after `base` and its tag.

    `sizes`: bytes of files by path below the folder.
    """
    models = models_among(sizes)
    tags = Counter(tag_of(name) for name in models)
    return [
        StoredModel(
            f"{base}:{tag_of(name) if tags[tag_of(name)] == 1 else stem_of(name)}",
            folder / name,
            program,
            num_bytes,
        )
        for name, num_bytes in models.items()
    ]
