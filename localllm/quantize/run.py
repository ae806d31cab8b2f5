"""`localllm quantize` without its interface: a checkpoint in, a smaller one with a report out."""

import json
import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.answer.evaluation import Evaluation
from localllm.answer.opening import open_model
from localllm.engine.chosen_operators import library_folder
from localllm.engine.config import EngineConfig
from localllm.engine.threads import choose_threads
from localllm.errors import CheckpointError, RequestError
from localllm.files.json_file import read_json_object
from localllm.files.model_file import read_model_file
from localllm.hub.checkpoint import Checkpoint
from localllm.model.architecture import EMBEDDING, HEAD, TABLE, layer_name
from localllm.model.found_head import FoundHead
from localllm.model.layer import LayerPlan
from localllm.model.packed.weight import PackedWeight
from localllm.model.rope import RopeTables
from localllm.model.stored_names import named_for_files
from localllm.model.tower import text_config
from localllm.model.weight_files import GGUF_NAME, fingerprint
from localllm.model.weights import WeightReader, open_source, open_weights
from localllm.quantize.calibrate import NUM_WRITERS, CalibrationRequest, CalibrationText, make_text
from localllm.quantize.ends import mean_moments, round_to_int4, round_to_int8
from localllm.quantize.gguf_source import PAIRED
from localllm.quantize.layer import LayerQuantizer, TensorParts
from localllm.quantize.layer_files import (
    exact_vectors,
    part_name,
    read_layer,
    stored_layer,
    stored_tensors,
    write_layer,
)
from localllm.quantize.proof import compare, compare_speeds
from localllm.quantize.quantized_layer import QuantizedLayer
from localllm.quantize.recipe import EndFormat, Recipe
from localllm.quantize.report import Outcome, write_report
from localllm.quantize.rounding import round_layer
from localllm.quantize.source import CheckedFolder, Ends, open_unquantized, result_bytes
from localllm.quantize.stream import CalibrationStream
from localllm.quantize.work_folder import WorkFolder, check_space, open_work_folder
from localllm.text import template_files
from localllm.text.tokenizer_files import MAX_TOKENIZER_BYTES
from localllm.user.version import __version__
from localllm_kernels import TORCH_OPS, Ops, select_ops

logger = logging.getLogger(__name__)

# (stage, steps done, steps in all, a remark)
Progress = Callable[[str, int, int, str], None]
_CALIBRATION = "calibration"
_REST = "rest"
_HEAD_THAT_DRAFTS = "head"
_COPIED = (
    *("*.json", "*.jinja", f"{template_files.FOLDER}/*.jinja"),
    *("*.model", "*.txt", "LICENSE*", "NOTICE*"),
)
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "localllm_quant.json", GGUF_NAME)


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Everything that a run was asked to do."""

    model: str
    out: Path
    recipe: Recipe
    calibration: CalibrationRequest
    device: torch.device
    resume: bool = False
    verify: bool = True
    threads: int | None = None


def quantize_model(request: QuantizeRequest, progress: Progress) -> Outcome:
    """Quantize a model layer by layer, and measure what it cost.

    Raises: as opening a model does; RequestError, DiskError; CheckpointError for a weight that
    is not finite.
    """
    started = time.monotonic()
    checkpoint, source = open_unquantized(request.model, request.recipe)
    if request.calibration.length > source.architecture.max_position_embeddings:
        raise RequestError(
            f"windows of {request.calibration.length:,} tokens exceed the context of "
            f"{checkpoint.name}, {source.architecture.max_position_embeddings:,} tokens",
            param="calib-seqlen",
            hint="a smaller --calib-seqlen",
        )
    with open_work_folder(request.out) as work:
        check_space(request.out.parent, 2 * result_bytes(source, request.recipe))
        state = {
            "recipe": asdict(request.recipe),
            "calibration": request.calibration.described(),
            "source": fingerprint(source.folder, sorted(source.weights.files)),
            "version": __version__,
        }
        work.begin(state, resume=request.resume)
        job = _Job(request, checkpoint, source, work, progress)
        with torch.inference_mode():
            job.quantize_layers()
            job.write_head()
            job.write_rest()
        outcome = job.finish(started)
        work.publish()
    return outcome


class _Job:
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
        self._stored_dtype: torch.dtype = getattr(torch, source.architecture.dtype)
        self._device = request.device
        self._plans = source.architecture.layers
        self._num_layers = len(self._plans)
        self._text: CalibrationText | None = None
        is_tied = source.architecture.tie_word_embeddings
        self._ends = self._recipe.ends(is_tied=is_tied)
        self._is_shared = self._recipe.is_stored_once(is_tied=is_tied)
        # Of the inputs of a head in 4 bits, once the layers before it are written.
        self._head_moments: Tensor | None = None

    def quantize_layers(self) -> None:
        streams = None
        if self._recipe.uses_inputs:
            streams = self._open_streams(self.calibration_text().windows)
        self._take_threads()
        self._progress("layers", 0, self._num_layers, "")
        with open_weights(self._source.weights, torch.float32, self._device) as reader:
            for i in range(self._num_layers):
                if streams is not None:
                    stream, reference = streams
                    stream = self._calibrate_layer(
                        i, self._read_layer(reader, i), stream, reference
                    )
                    streams = stream, reference
                elif not self._work.has(part_name(i)):
                    self._write_layer(
                        i, self._rounded_layer(self._read_layer(reader, i), self._plans[i])
                    )
                errors: dict[str, float] = self._work.notes(part_name(i))["errors"]
                worst = max(errors, key=errors.__getitem__)
                self._progress("layers", i + 1, self._num_layers, f"{worst} {errors[worst]:.2%}")
            if streams is not None and HEAD in self._ends and not self._work.has(_REST):
                norm, ops = reader.last_norm(self._source.architecture), streams[0].ops
                self._head_moments = mean_moments(norm(x, ops) for x in streams[0].rows())

    def _calibrate_layer(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        stream: CalibrationStream,
        reference: CalibrationStream,
    ) -> CalibrationStream:
        """Quantize a layer if it is not written yet, and pass both streams through it; returns the
        first stream, which may be a new object.
        """
        plan = self._plans[index]
        stream.enter(index)
        reference.enter(index)
        if self._work.has(part_name(index)):
            reference.pass_through(plan.build(TensorParts.within(tensors, reference)))
            done = TensorParts.within(self._read_written(index), stream)
            stream.pass_through(plan.build(done))
            return stream
        inside = stream.copy()
        quantizer = LayerQuantizer(
            tensors, plan, self._recipe, self._stored_dtype, (inside, reference)
        )
        self._write_layer(index, quantizer.run())
        # Continue with the values in its file, so that a resumed run computes with the same ones.
        written = self._read_written(index)
        layer = plan.build(TensorParts.within(written, stream))
        if quantizer.passed(written):
            inside.add(layer.sublayers[-1])
            return inside
        stream.pass_through(layer)
        return stream

    def _read_written(self, index: int) -> dict[str, Tensor]:
        return read_layer(self._work, index, self._recipe.scheme, self._device)

    def _write_layer(self, index: int, layer: QuantizedLayer) -> None:
        exact = exact_vectors(self._source.weights, index, self._plans[index])
        write_layer(self._work, index, layer, self._recipe.scheme, self._stored_dtype, exact)

    def write_rest(self) -> None:
        if self._work.has(_REST):
            return
        tensors: dict[str, Tensor] = {}
        in_layers = {
            f"{layer_name(i)}.{name}"
            for i, plan in enumerate(self._plans)
            for name in plan.tensors()
        }
        with open_weights(self._source.weights, self._stored_dtype, torch.device("cpu")) as reader:
            for name in self._source.weights.plain:
                if name not in in_layers:
                    tensors[name] = reader.read(name)
        table = tensors[EMBEDDING]
        plain = {TABLE: table, HEAD: tensors.get(f"{HEAD}.weight", table)}
        for name, end in self._ends.items():
            weight = self._round_end(plain[name], end)
            tensors.pop(f"{name}.weight", None)
            tensors |= stored_tensors(name, weight, end.scheme, self._stored_dtype)
        if self._is_shared:  # transformers wants scales for each linear, tied or not
            tensors[f"{HEAD}.weight_scale"] = tensors[f"{TABLE}.weight_scale"].clone()
        self._work.write(_REST, named_for_files(tensors, self._source.architecture), {})

    def _round_end(self, weight: Tensor, end: EndFormat) -> PackedWeight:
        if end.group_size is None:
            return round_to_int8(weight)
        return round_to_int4(
            weight,
            end.group_size,
            self._head_moments,
            lambda done: self._progress("head", done, len(weight), ""),
        )

    def write_head(self) -> None:
        """Write the head that drafts, if there is one. Its layer is rounded without regard to its
        inputs, whatever the method: what it errs costs drafts, never text.
        """
        head = self._source.head
        if head is None or self._work.has(_HEAD_THAT_DRAFTS):
            return
        prefix, [plan] = f"{layer_name(0)}.", head.architecture.layers
        cpu = torch.device("cpu")
        with open_weights(head.weights, torch.float32, cpu) as reader:
            own = {name: reader.read(f"{prefix}{name}") for name in plan.tensors()}
        layer, dtype = self._rounded_layer(own, plan), self._stored_dtype
        exact = exact_vectors(head.weights, 0, plan)
        stored = stored_layer(prefix, layer, self._recipe.scheme, dtype, exact)
        with open_source(head.weights) as source:
            for name in head.weights.plain.keys() - {f"{prefix}{name}" for name in own}:
                value = source.plain(name)
                stored[name] = value.to(dtype) if value.is_floating_point() else value
        named = {head.layout.stored_name(name): value for name, value in stored.items()}
        errors = {
            head.layout.stored_name(f"{prefix}{name}"): error
            for name, error in layer.errors.items()
        }
        self._work.write(_HEAD_THAT_DRAFTS, named, {"errors": errors})

    def finish(self, started: float) -> Outcome:
        """Assemble the checkpoint, measure it, and write its report."""
        self._progress("writing", 0, 1, "")
        names = [*map(part_name, range(self._num_layers)), _REST]
        if self._source.head is not None:
            names.append(_HEAD_THAT_DRAFTS)
        folder = self._work.assemble(names)
        self._write_config(folder)
        self._copy_small_files(folder)
        result = CheckedFolder.open(folder)
        errors = {
            f"{layer_name(i)}.{linear}": error
            for i in range(self._num_layers)
            for linear, error in self._work.notes(part_name(i))["errors"].items()
        }
        if self._source.head is not None:
            errors |= self._work.notes(_HEAD_THAT_DRAFTS)["errors"]
        quality: Evaluation | None = None
        speeds: tuple[float, float] | None = None
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
            ends=Ends.of(self._source, self._recipe),
            widest=max(shape[1] for shape in self._source.architecture.quantized().values()),
            calibration=calibration,
            layer_errors=errors,
            expert_rows={
                f"{layer_name(i)}.{linear}": rows
                for i in range(self._num_layers)
                for linear, rows in self._work.notes(part_name(i))["rows"].items()
            },
            quality=quality,
            decode_tokens_per_s=speeds,
            seconds=time.monotonic() - started,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        write_report(folder, outcome)
        return outcome

    def calibration_text(self) -> CalibrationText:
        """The calibration text, made once and then kept in the work folder."""
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
        config = EngineConfig(
            max_model_len=asked.length,
            max_num_seqs=NUM_WRITERS,
            **self._engine_fields,
            dtype=self._source.architecture.dtype,  # the built-in model answers in float32
        )
        counts = asked.counts(calibrates=self._recipe.uses_inputs)
        if asked.is_written:
            self._progress("calibration text", 0, counts.total * counts.length, "")
        return make_text(
            asked,
            counts,
            self._checkpoint.tokenizer,
            lambda: open_model(self._request.model, config),
            lambda done, total: self._progress("calibration text", done, total, ""),
        )

    def _open_streams(self, windows: Tensor) -> tuple[CalibrationStream, CalibrationStream]:
        """One stream through the quantized layers, and one through the unquantized ones."""
        ropes = RopeTables(windows.shape[1], self._device)
        with open_weights(self._source.weights, torch.float32, torch.device("cpu")) as reader:
            stream = CalibrationStream.begin(
                reader, self._source.architecture, windows, ropes, float32_ops(self._device)
            )
        return stream, stream.copy()

    def _rounded_layer(self, tensors: Mapping[str, Tensor], plan: LayerPlan) -> QuantizedLayer:
        return round_layer(tensors, plan, self._recipe, float32_ops(self._device))

    def _read_layer(self, reader: WeightReader, index: int) -> dict[str, Tensor]:
        names = self._plans[index].tensors()
        tensors = {name: reader.read(f"{layer_name(index)}.{name}") for name in names}
        reader.release()
        return tensors

    def _verify(self, result: CheckedFolder) -> tuple[Evaluation, tuple[float, float] | None]:
        self._progress("measuring", 0, 2, "")
        self._take_threads()
        quality = compare(
            result,
            self._source,
            self.calibration_text().held_back,
            dtype=torch.float32,
            device=self._device,
            ops=float32_ops(self._device),
        )
        self._progress("measuring", 1, 2, "")
        config = EngineConfig(max_model_len=128, max_num_seqs=1, **self._engine_fields)
        speeds = compare_speeds((self._request.model, str(result.folder)), config)
        self._progress("measuring", 2, 2, "")
        return quality, speeds

    @property
    def _engine_fields(self) -> dict[str, Any]:
        return {"device": self._device.type, "threads": self._request.threads}

    def _take_threads(self) -> None:
        """Use all threads: an engine may have left fewer."""
        if self._device.type == "cpu":
            torch.set_num_threads(choose_threads(self._request.threads).most)

    def _write_config(self, folder: Path) -> None:
        raw = dict(text_config(read_json_object(self._source.folder / "config.json")))
        architecture = self._source.architecture
        skipped = sorted(architecture.layer_linears().keys() - architecture.quantized().keys())
        ends = {**self._ends, **({HEAD: self._ends[TABLE]} if self._is_shared else {})}
        skipped += [] if HEAD in ends else [HEAD]
        if self._source.head is not None:
            skipped += self._kept_of_head(self._source.head)
        if (raw.get("quantization_config") or {}).get("quant_method") == "gguf":
            raw.pop(PAIRED, None)
        stored = named_for_files({f"{name}.": end for name, end in ends.items()}, architecture)
        raw["quantization_config"] = self._recipe.quantization_config(
            skipped, {name.removesuffix("."): end for name, end in stored.items()}
        )
        if HEAD in self._ends:
            raw["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def _kept_of_head(head: FoundHead) -> list[str]:
        """The linears of a head that stay as they are, by their names in files."""
        own = head.architecture.linears().keys() - head.architecture.quantized().keys()
        return sorted(head.layout.stored_name(f"{name}.").removesuffix(".") for name in own)

    def _copy_small_files(self, folder: Path) -> None:
        for pattern in _COPIED:
            for path in sorted(self._source.folder.glob(pattern)):
                if path.name in _NOT_COPIED:
                    continue
                try:
                    data = read_model_file(path, MAX_TOKENIZER_BYTES)
                except CheckpointError as error:  # the model was opened without it
                    logger.warning("not copied: %s", error.message)
                    continue
                copy = folder / path.relative_to(self._source.folder)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(data)


def float32_ops(device: torch.device) -> Ops:
    """Operators that compute in float32: localllm's own on a CPU, torch's on a GPU."""
    if device.type == "cuda":
        return TORCH_OPS
    return select_ops("cpu", "auto", torch.float32, library_folder=library_folder())
