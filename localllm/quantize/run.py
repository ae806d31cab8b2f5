"""`localllm quantize`, without its face: a checkpoint in, a smaller one with its report out."""

import hashlib
import json
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm import __version__
from localllm.config import EngineConfig
from localllm.errors import CheckpointError, RequestError
from localllm.evaluation import Evaluation
from localllm.json_file import read_json_object
from localllm.model.architectures import expected_tensors, layer_windows
from localllm.model.layers import DecoderLayer
from localllm.model.quantized import Int4Weight, Int8Weight, QuantizedWeight
from localllm.model.rope import RopeTable
from localllm.model.weights import WeightReader, open_weights
from localllm.quantize.calibrate import CalibrationText, WindowCounts, cut_text, write_text
from localllm.quantize.dataset import fetch_dataset_text
from localllm.quantize.layer import LayerQuantizer, LayerShape
from localllm.quantize.proof import compare, decode_speed
from localllm.quantize.recipe import Recipe
from localllm.quantize.report import Outcome, write_report
from localllm.quantize.rounding import round_int8, round_weight
from localllm.quantize.source import CheckedFolder, fingerprint, open_source, result_bytes
from localllm.quantize.stream import CalibrationStream
from localllm.quantize.work_folder import WorkFolder, check_space, open_work_folder
from localllm.session import Checkpoint, open_model
from localllm_kernels import TORCH_OPS

# (what is being done, steps done, steps in all, a remark)
Progress = Callable[[str, int, int, str], None]
# Of the windows asked for, so many more are taken and held back.
HELD_BACK_SHARE = 8
MIN_WINDOW = 16
_CALIBRATION = "calibration"
_REST = "rest"
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "localllm_quant.json")


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """What calibrates: a file, a data set of the hub, or, with neither, the model itself."""

    text: str | None = None
    text_name: str | None = None
    dataset: str | None = None
    num_windows: int = 128
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low in (
            ("calib-samples", self.num_windows, 1),
            ("calib-seqlen", self.length, MIN_WINDOW),
        ):
            if value < low:
                raise RequestError(f"--{name} must be at least {low}, found {value}", param=name)


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Everything that was asked for."""

    model: str
    out: Path
    recipe: Recipe
    calibration: CalibrationRequest
    device: torch.device
    resume: bool = False
    verify: bool = True


def quantize_model(request: QuantizeRequest, progress: Progress) -> Outcome:
    """Quantize a model layer by layer, and measure what it cost.

    Raises: what opening a model does; RequestError, DiskError; CheckpointError for a weight that
    is not finite.
    """
    started = time.monotonic()
    checkpoint, source = open_source(request.model, request.recipe)
    if request.calibration.length > source.config.max_position_embeddings:
        raise RequestError(
            f"windows of {request.calibration.length:,} tokens are over the context of "
            f"{checkpoint.name}, {source.config.max_position_embeddings:,}",
            param="calib-seqlen",
            hint="a smaller --calib-seqlen",
        )
    with open_work_folder(request.out) as work:
        check_space(request.out.parent, 2 * result_bytes(source, request.recipe))
        state = {
            "recipe": request.recipe.described(),
            "calibration": _describe_calibration(request.calibration),
            "source": fingerprint(source),
            "version": __version__,
        }
        work.begin(state, resume=request.resume)
        job = _Job(request, checkpoint, source, work, progress)
        with torch.inference_mode():
            job.quantize_layers()
            job.write_rest()
        outcome = job.finish(started)
        work.publish()
    return outcome


class _Job:
    """One quantization on its way."""

    def __init__(
        self,
        request: QuantizeRequest,
        checkpoint: Checkpoint,
        source: CheckedFolder,
        work: WorkFolder,
        progress: Progress,
    ) -> None:
        self._request, self._recipe = request, request.recipe
        self._checkpoint, self._source = checkpoint, source
        self._work, self._progress = work, progress
        self._stored_dtype: torch.dtype = getattr(torch, source.config.dtype)
        self._num_layers = source.config.num_layers
        self._text: CalibrationText | None = None

    def quantize_layers(self) -> None:
        """Write every layer that is not written yet."""
        streams = None
        if self._recipe.uses_inputs:
            streams = self._open_streams(self.calibration_text().windows)
        windows = layer_windows(self._source.config, self._source.spec)
        with open_weights(self._source.weights, torch.float32, self._request.device) as reader:
            for i in range(self._num_layers):
                shape = LayerShape(self._source.config, windows[i])
                name = _layer_name(i)
                is_written = self._work.has(name)
                if is_written and streams is None:
                    continue
                tensors = self._read_layer(reader, i)
                if not is_written:
                    self._quantize_layer(i, tensors, shape, streams)
                elif streams is not None:
                    streams[1].pass_through(shape.build(tensors))
                if streams is not None and i + 1 < self._num_layers:
                    streams[0].pass_through(self._written_layer(i, shape))
                errors = self._work.notes(name)["errors"]
                worst = max(errors, key=errors.__getitem__)
                remark = f"{worst} {errors[worst]:.2%}"
                self._progress("layers", i + 1, self._num_layers, remark)

    def write_rest(self) -> None:
        """Write what is no layer: embedding, last norm, head."""
        if self._work.has(_REST):
            return
        tensors: dict[str, Tensor] = {}
        with open_weights(self._source.weights, self._stored_dtype, torch.device("cpu")) as reader:
            for name in self._source.weights.plain:
                if not name.startswith("model.layers."):
                    tensors[name] = _finite(name, reader.read(name))
        if self._recipe.int8_head:
            head = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"])
            stored = Recipe(method="int8").scheme.write(
                self._in_stored_dtype(round_int8(head.float()))
            )
            tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}
        self._work.write(_REST, tensors, {})

    def finish(self, started: float) -> Outcome:
        """Assemble the checkpoint, measure it, and write its report."""
        self._progress("writing", 0, 1, "")
        names = [*map(_layer_name, range(self._num_layers)), _REST]
        folder = self._work.assemble(names)
        self._write_config(folder)
        self._copy_small_files(folder)
        result = CheckedFolder.open(folder)
        errors = {
            f"model.layers.{i}.{linear}": error
            for i in range(self._num_layers)
            for linear, error in self._work.notes(_layer_name(i))["errors"].items()
        }
        quality: Evaluation | None = None
        speeds: tuple[float | None, float | None] = (None, None)
        if self._request.verify:
            quality, speeds = self._verify(result)
        calibration = None
        if self._recipe.uses_inputs:
            text = self.calibration_text()
            calibration = {
                "source": text.source,
                "windows": len(text.windows),
                "length": text.windows.shape[1],
                "sha256": text.sha256,
            }
        outcome = Outcome(
            out=self._request.out,
            recipe=self._recipe,
            source=self._checkpoint.name,
            source_bytes=self._source.num_bytes,
            result_bytes=result.num_bytes,
            calibration=calibration,
            layer_errors=errors,
            quality=quality,
            decode_tokens_per_s=speeds,
            seconds=time.monotonic() - started,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        write_report(folder, outcome)
        return outcome

    def calibration_text(self) -> CalibrationText:
        """The text, as it was when the run began."""
        if self._text is None:
            if not self._work.has(_CALIBRATION):
                text = self._make_text()
                tensors = {"windows": text.windows, "held_back": text.held_back}
                self._work.write(_CALIBRATION, tensors, {"source": text.source})
            tensors = self._work.read(_CALIBRATION)
            source = self._work.notes(_CALIBRATION)["source"]
            self._text = CalibrationText(source, tensors["windows"], tensors["held_back"])
        return self._text

    def _make_text(self) -> CalibrationText:
        asked = self._request.calibration
        counts = WindowCounts(
            calibrating=asked.num_windows if self._recipe.uses_inputs else 0,
            held_back=max(2, asked.num_windows // HELD_BACK_SHARE),
            length=asked.length,
        )
        if asked.text is not None or asked.dataset is not None:
            text = asked.text
            if text is None:
                assert asked.dataset is not None
                text = fetch_dataset_text(asked.dataset)
            return cut_text(
                asked.text_name or asked.dataset or "text",
                text,
                self._checkpoint.tokenizer,
                counts,
            )
        device: Any = self._request.device.type
        config = EngineConfig(max_model_len=asked.length, max_num_seqs=64, device=device)
        return write_text(
            open_model(self._request.model, config),
            counts,
            asked.seed,
            lambda done, total: self._progress("calibration text", done, total, ""),
        )

    def _open_streams(self, windows: Tensor) -> tuple[CalibrationStream, CalibrationStream]:
        """The stream through the quantized layers and that through the whole ones."""
        config = self._source.config
        device = self._request.device
        rope = RopeTable.build(config.rope, config.head_dim, windows.shape[1], device)
        with open_weights(self._source.weights, torch.float32, torch.device("cpu")) as reader:
            hidden = reader.read("model.embed_tokens.weight")[windows]
        stream = CalibrationStream(hidden, rope, TORCH_OPS)
        return stream, stream.copy()

    def _read_layer(self, reader: WeightReader, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        names = [
            name
            for name in expected_tensors(self._source.config, self._source.spec)
            if name.startswith(prefix)
        ]
        return {name.removeprefix(prefix): _finite(name, reader.read(name)) for name in names}

    def _quantize_layer(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        shape: LayerShape,
        streams: tuple[CalibrationStream, CalibrationStream] | None,
    ) -> None:
        weights: dict[str, QuantizedWeight] = {}
        if streams is None:
            plain, errors = dict(tensors), {}
            for name in [name for name in tensors if name.endswith("_proj.weight")]:
                weight = plain.pop(name)
                linear = name.removesuffix(".weight")
                weights[linear] = round_weight(weight, self._recipe)
                lost = (weights[linear].dequantize(torch.float32) - weight).square().sum()
                errors[linear] = float(lost / weight.square().sum().clamp(min=1e-30))
        else:
            stream, reference = streams
            quantizer = LayerQuantizer(
                tensors, shape, self._recipe, self._stored_dtype, (stream.copy(), reference)
            )
            result = quantizer.run()
            weights, plain, errors = dict(result.weights), result.plain, result.errors
        prefix = f"model.layers.{index}."
        stored = {
            f"{prefix}{linear}.{suffix}": tensor
            for linear, weight in weights.items()
            for suffix, tensor in self._recipe.scheme.write(self._in_stored_dtype(weight)).items()
        }
        stored |= {
            f"{prefix}{name}": tensor.to(self._stored_dtype) for name, tensor in plain.items()
        }
        self._work.write(_layer_name(index), stored, {"errors": errors})

    def _in_stored_dtype(self, weight: QuantizedWeight) -> QuantizedWeight:
        if isinstance(weight, (Int4Weight, Int8Weight)):
            return replace(weight, scales=weight.scales.to(self._stored_dtype))
        return weight

    def _written_layer(self, index: int, shape: LayerShape) -> DecoderLayer:
        """The layer as its file has it, so that a resumed run goes on with the same values."""
        prefix = f"model.layers.{index}."
        device = self._request.device
        stored = {
            name.removeprefix(prefix): tensor.to(device)
            for name, tensor in self._work.read(_layer_name(index)).items()
        }
        marker = f".{self._recipe.scheme.marker}"
        tensors: dict[str, Tensor] = {}
        for linear in [name.removesuffix(marker) for name in stored if name.endswith(marker)]:
            parts = {
                name.removeprefix(f"{linear}."): stored[name]
                for name in stored
                if name.startswith(f"{linear}.") and not name.endswith(".bias")
            }
            weight = self._recipe.scheme.read(parts)
            tensors[f"{linear}.weight"] = weight.dequantize(torch.float32)
            for suffix in parts:
                del stored[f"{linear}.{suffix}"]
        tensors |= {name: tensor.float() for name, tensor in stored.items()}
        return shape.build(tensors)

    def _verify(
        self, result: CheckedFolder
    ) -> tuple[Evaluation, tuple[float | None, float | None]]:
        self._progress("measuring", 0, 3, "")
        quality = compare(
            result,
            self._source,
            self.calibration_text().held_back,
            dtype=torch.float32,
            device=self._request.device,
            ops=TORCH_OPS,
        )
        device: Any = self._request.device.type
        config = EngineConfig(max_model_len=128, max_num_seqs=1, device=device)
        self._progress("measuring", 1, 3, "")
        before = decode_speed(self._request.model, config)
        self._progress("measuring", 2, 3, "")
        after = decode_speed(str(result.folder), config)
        self._progress("measuring", 3, 3, "")
        return quality, (before, after)

    def _write_config(self, folder: Path) -> None:
        raw = read_json_object(self._source.folder / "config.json")
        skipped = [] if self._recipe.int8_head else ["lm_head"]
        raw["quantization_config"] = self._recipe.quantization_config(skipped)
        if self._recipe.int8_head:
            raw["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")

    def _copy_small_files(self, folder: Path) -> None:
        for pattern in _COPIED:
            for path in sorted(self._source.folder.glob(pattern)):
                if path.name not in _NOT_COPIED and path.is_file():
                    shutil.copyfile(path, folder / path.name)


def _layer_name(index: int) -> str:
    return f"layer-{index:05}"


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"tensor {name!r} holds values that are not finite",
            hint="download the model again; if it stays so, the checkpoint is broken",
        )
    return tensor


def _describe_calibration(asked: CalibrationRequest) -> dict[str, Any]:
    described = asdict(asked)
    if asked.text is not None:
        described["text"] = hashlib.sha256(asked.text.encode()).hexdigest()
    return described
