"""The built-in model as a GGUF file, with its vocabulary and its template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf_files import converted
from gguf_keys import add_keys
from safetensors.torch import load_file

POCKET = Path(__file__).parents[1] / "localllm" / "pocket"
_NORMAL, _CONTROL = 1, 3


@dataclass(frozen=True)
class _Pocket:
    """What `converted` asks of a model."""

    config: dict[str, Any]
    arch: str = "qwen3"


def write_pocket(path: Path, matrices: str = "F32") -> Path:
    """Write it with matrices of this type, but for its head for further tokens."""
    model = _Pocket(json.loads((POCKET / "config.json").read_text()))
    tensors = load_file(POCKET / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    add_keys(writer, model.arch, model.config, 0)
    _add_vocabulary(writer)
    for name, tensor in converted(model, own).items():  # type: ignore[arg-type]
        values = tensor.contiguous().float().numpy()
        kind = gguf.GGMLQuantizationType[matrices if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    state = json.loads((POCKET / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in state["added_tokens"]}
    by_id = {number: text for text, number in state["model"]["vocab"].items()} | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id[number] for number in range(len(by_id))])
    writer.add_token_types([_CONTROL if i in added else _NORMAL for i in range(len(by_id))])
    merges = state["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template((POCKET / "chat_template.jinja").read_text())
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
