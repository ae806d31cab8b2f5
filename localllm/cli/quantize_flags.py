"""The flags of `quantize`, and the recipe and calibration that they ask for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from localllm.cli.common_flags import MaxKl
from localllm.cli.flags import Flags, option
from localllm.cli.user_input import read_file
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.quantize.calibrate import CalibrationRequest
    from localllm.quantize.recipe import Recipe

# Those of `recipe`, whose module needs torch.
METHODS = ("rtn", "awq", "gptq", "awq+gptq", "int8", "fp8")
FILE_FORMATS = ("compressed-tensors", "awq", "gptq", "fp8")


@dataclass(frozen=True, slots=True)
class RecipeFlags(Flags):
    """What is made of the weights."""

    method: Annotated[str, option("--method", help="How it is rounded.", choices=METHODS)] = "gptq"
    bits: Annotated[int | None, typer.Option("--bits", help="4, or 8 for int8 and fp8.")] = None
    group_size: Annotated[
        int, option("--group-size", help="Weights that share a scale: 32, 64 or 128.")
    ] = 128
    symmetric: Annotated[
        bool | None,
        typer.Option("--sym/--asym", help="Without or with zero points; the format decides."),
    ] = None
    file_format: Annotated[
        str, option("--format", help="How it is written.", choices=FILE_FORMATS)
    ] = "compressed-tensors"
    head: Annotated[
        str, option("--head", help="The output head: as it is, or int8.", choices=("keep", "int8"))
    ] = "keep"

    def check(self) -> None:
        """Raises: RequestError for bits that the method does not make, or an unknown head."""
        wanted_bits = 8 if self.method in ("int8", "fp8") else 4
        if self.bits not in (None, wanted_bits):
            raise RequestError(
                f"{self.method} makes {wanted_bits} bits, not {self.bits}", param="bits"
            )
        if self.head not in ("keep", "int8"):
            raise RequestError(
                f"--head must be keep or int8, found {self.head!r:.40}", param="head"
            )

    def recipe(self) -> "Recipe":
        """The Recipe they ask for. Raises: RequestError."""
        from localllm.quantize.recipe import Recipe

        is_symmetric = self.file_format != "awq" if self.symmetric is None else self.symmetric
        return Recipe(
            method=cast(Any, self.method),
            group_size=self.group_size,
            symmetric=is_symmetric,
            file_format=cast(Any, self.file_format),
            int8_head=self.head == "int8",
        )


@dataclass(frozen=True, slots=True)
class CalibrationFlags(Flags):
    """The text that is calibrated on; without a flag the model writes it."""

    calib_text: Annotated[
        Path | None, typer.Option("--calib-text", help="Calibrate on this text file.")
    ] = None
    calib_dataset: Annotated[
        str | None, typer.Option("--calib-dataset", help="Calibrate on a data set of the hub.")
    ] = None
    calib_samples: Annotated[
        int, option("--calib-samples", help="Windows of calibration text.")
    ] = 128
    calib_seqlen: Annotated[int, option("--calib-seqlen", help="Tokens in each of them.")] = 512
    seed: Annotated[int, option("--seed", help="Of the text that the model writes.")] = 0

    def read_text(self) -> str | None:
        """The file, if one is given. Raises: RequestError, also where a data set is given too."""
        if self.calib_text is not None and self.calib_dataset is not None:
            raise RequestError("either --calib-text or --calib-dataset", param="calib_text")
        return None if self.calib_text is None else read_file(self.calib_text)

    def request(self, text: str | None) -> "CalibrationRequest":
        """The CalibrationRequest they ask for; `text` is that of `read_text`."""
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
    """Whether the work goes on where it was, or is only planned."""

    resume: Annotated[
        bool, typer.Option("--resume", help="Go on at the last whole layer of an unfinished run.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say sizes and time, and do nothing.")
    ] = False


@dataclass(frozen=True, slots=True)
class QualityFlags(Flags):
    """Whether the result is measured, and how bad it may be."""

    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Measure the result against the source.")
    ] = True
    max_kl: MaxKl = None
    max_ppl_increase: Annotated[
        float | None,
        typer.Option("--max-ppl-increase", help="Exit 10 if the perplexity grows by more, in %."),
    ] = None

    def check(self) -> None:
        """Raises: RequestError for a threshold without the measurement."""
        if not self.verify and (self.max_kl, self.max_ppl_increase) != (None, None):
            raise RequestError("a threshold needs the measurement", hint="leave --no-verify out")


@dataclass(frozen=True, slots=True)
class QuantizeFlags(Flags):
    """All flags of `quantize` that are its own."""

    recipe: RecipeFlags
    calibration: CalibrationFlags
    run: RunFlags
    quality: QualityFlags
