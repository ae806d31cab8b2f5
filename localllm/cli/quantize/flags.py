"""The flags of `quantize`, and the recipe and calibration that they specify."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from localllm.cli.draw.output import note
from localllm.cli.flags.groups import Flags, flag, setting
from localllm.cli.flags.values import parse_choice
from localllm.cli.input.user_input import read_file
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.quantize.calibrate import CalibrationRequest
    from localllm.quantize.recipe import Recipe

# As in `recipe`, whose module imports torch.
METHODS = ("rtn", "awq", "gptq", "awq+gptq", "int8", "fp8", "mxfp4", "nvfp4", "trellis")
EMBEDDINGS = ("keep", "int8")
HEADS = (*EMBEDDINGS, "int4")
FILE_FORMATS = ("compressed-tensors", "awq", "gptq", "fp8")


@dataclass(frozen=True, slots=True)
class RecipeFlags(Flags):
    """How the weights are quantized and written."""

    method: str | None = setting(
        help="How weights are rounded; by default gptq, or trellis for 3 bits.", choices=METHODS
    )
    bits: int | None = flag(help="4; 3 for trellis; 8 for int8 and fp8.")
    group_size: int | None = setting(
        help="Weights that share a scale: 32, 64 or 128; by default the largest that fits."
    )
    symmetric: bool | None = flag(
        None, "--sym/--asym", help="Without or with zero points; by default as the format needs."
    )
    file_format: str = setting(
        "compressed-tensors",
        "--format",
        help="Format of the written checkpoint.",
        choices=FILE_FORMATS,
    )
    embedding: str | None = setting(
        help="Keep the embedding, or make it int8; int8 by default where the format holds it.",
        choices=EMBEDDINGS,
    )
    head: str | None = setting(
        help="Keep the output head, or make it int8 or int4; by default as the embedding.",
        choices=HEADS,
    )

    def check(self) -> None:
        """Raises: RequestError for bits that the method does not produce, or an unknown type of the
        embedding or the head.
        """
        wanted_bits = {"int8": 8, "fp8": 8, "trellis": 3}.get(self._method, 4)
        if self.bits not in (None, wanted_bits):
            raise RequestError(
                f"{self._method} produces {wanted_bits} bits, not {self.bits}",
                param="bits",
                hint="leave out --method for 3 or 4 bits; --method int8 or fp8 for 8",
            )
        if self._method == "trellis" and (self.group_size, self.symmetric) != (None, None):
            raise RequestError(
                "weights of 3 bits have a scale for each row",
                param="bits",
                hint="leave out --group-size, --sym and --asym",
            )
        for name, value, known in (
            ("embedding", self.embedding, EMBEDDINGS),
            ("head", self.head, HEADS),
        ):
            if value is not None:
                parse_choice(name, value, known)

    @property
    def _method(self) -> str:
        """The method that was chosen, or the default one for the bits."""
        return self.method or ("trellis" if self.bits == 3 else "gptq")

    def recipe(self, model: str) -> "Recipe":
        """The Recipe that the flags specify for a model, with a note about smaller groups than
        usual. Raises: RequestError.
        """
        from localllm.quantize.recipe import GROUP_SIZES, Recipe, holds_ends
        from localllm.quantize.source import fit_groups

        is_symmetric = self.file_format != "awq" if self.symmetric is None else self.symmetric
        small = "int8" if holds_ends(cast(Any, self.file_format)) else "keep"
        embedding = small if self.embedding is None else self.embedding
        recipe = Recipe(
            method=cast(Any, self._method),
            group_size=GROUP_SIZES[-1] if self.group_size is None else self.group_size,
            symmetric=is_symmetric,
            file_format=cast(Any, self.file_format),
            embedding=cast(Any, embedding),
            head=cast(Any, embedding if self.head is None else self.head),
        )
        if self.group_size is not None:
            return recipe
        fitting, why = fit_groups(model, recipe)
        if why:
            note(f"groups of {fitting.group_size}, the largest that fit ({why})", dim=True)
        return fitting


@dataclass(frozen=True, slots=True)
class CalibrationFlags(Flags):
    """The calibration text; without a flag the model writes it."""

    calib_text: Path | None = flag(help="Calibrate on this text file.")
    calib_dataset: str | None = flag(help="Calibrate on a data set from the hub.")
    calib_samples: int = setting(40, help="Number of windows of calibration text.")
    calib_seqlen: int = setting(512, help="Tokens in each window.")
    seed: int = setting(0, help="Seed of the text that the model writes.")

    def read_text(self) -> str | None:
        """The file's text, if one is given. Raises: RequestError, also if a data set is given."""
        if self.calib_text is not None and self.calib_dataset is not None:
            raise RequestError(
                "--calib-text and --calib-dataset cannot be combined", param="calib_text"
            )
        return None if self.calib_text is None else read_file(self.calib_text)

    def request(self, text: str | None) -> "CalibrationRequest":
        """The CalibrationRequest that the flags specify; `text` comes from `read_text`."""
        from localllm.quantize.calibrate import CalibrationRequest

        return CalibrationRequest(
            text=text,
            text_name=None if self.calib_text is None else self.calib_text.name,
            dataset=self.calib_dataset,
            num_windows=self.calib_samples,
            length=self.calib_seqlen,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class RunFlags(Flags):
    """Whether an unfinished run is resumed, or a run only planned."""

    resume: bool = flag(False, help="Resume an unfinished run at its last whole layer.")
    dry_run: bool = flag(False, help="Only print sizes and time.")


@dataclass(frozen=True, slots=True)
class QualityFlags(Flags):
    """Whether the result is measured, and how much loss is allowed."""

    verify: bool = flag(True, "--verify/--no-verify", help="Measure the result against the source.")
    max_kl: float | None = flag(help="Exit 10 if the mean KL divergence is over this.")
    max_ppl_increase: float | None = flag(
        help="Exit 10 if the perplexity grows by more than this, in %."
    )

    def check(self) -> None:
        """Raises: RequestError for a threshold without the measurement."""
        if not self.verify and (self.max_kl, self.max_ppl_increase) != (None, None):
            raise RequestError(
                "--max-kl and --max-ppl-increase need the measurement", hint="leave out --no-verify"
            )


@dataclass(frozen=True, slots=True)
class QuantizeFlags(Flags):
    """The flags that only `quantize` has."""

    recipe: RecipeFlags
    calibration: CalibrationFlags
    run: RunFlags
    quality: QualityFlags
