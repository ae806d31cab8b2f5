"""Chooses the operators of a model on this GPU by the verdict of a self-check that runs once."""

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch

from localllm.model.architecture import HEAD
from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import StoredLinear
from localllm.operators.check import CheckRequest
from localllm.operators.listener import Listener
from localllm.operators.self_check import CheckError, check_operators
from localllm.operators.verdict import Finding, Verdict, VerdictFile
from localllm.user.version import __version__
from localllm_kernels.compiling.choice import ALL_OWN, SECOND_WAYS, Choice
from localllm_kernels.compiling.fingerprint import sources_fingerprint, triton_version

logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


def choose_operators(request: CheckRequest, listener: Listener) -> Choice:
    """Choose by the stored verdict, or by one that is found now."""
    verdict = find_verdict(request, listener)
    return ALL_OWN if verdict is None else verdict.choice()


def find_verdict(
    request: CheckRequest, listener: Listener, *, anew: bool = False
) -> Verdict | None:
    """The verdict of this GPU, None if nothing could be checked; `anew`: despite a stored one."""
    machine, shape = describe_machine(), describe_shape(request)
    file = VerdictFile.of(machine, shape)
    verdict = None if anew else file.read()
    if verdict is not None:
        replaced = describe_replaced(verdict)
        if replaced:
            listener.line(f"{replaced} (localllm doctor shows why)")
        return verdict
    listener.line(
        "checking this GPU's kernels, once for models of this shape; --no-self-check skips it"
    )
    began_s = time.monotonic()

    def tell(case: str) -> None:
        listener.doing(f"checking kernels on this GPU, once: {case}")

    try:
        outcomes = check_operators(request, tell, num_compilers=_compilers())
        verdict = Verdict(machine, shape, outcomes)
    except CheckError as error:
        logger.warning("this GPU's kernels are used unchecked: %s", error)
        return None
    finally:
        listener.doing("")
    if verdict.is_whole:  # else the check is repeated at the next start
        file.write(verdict)
    found = describe_replaced(verdict) or "none falls back to torch"
    seconds = time.monotonic() - began_s
    listener.line(f"checked {len(verdict.outcomes)} operators in {seconds:.0f} s: {found}")
    return verdict


def _compilers() -> int:
    """How many processes may compile at once: each has a context and weights on the GPU."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return min(4, (os.cpu_count() or 1) // 2, free_bytes // (6 << 30))


def describe_replaced(verdict: Verdict) -> str:
    """What torch computes in place of a kernel, and what is unchecked, in words; or nothing."""
    found = [each for each in verdict.findings() if each.piece not in SECOND_WAYS]
    replaced = [f"{each.piece} ({each.state})" for each in found if not each.is_taken]
    unchecked = [each.piece.value for each in found if each.state == "unchecked"]
    return "; ".join(
        f"{what} {', '.join(pieces)}"
        for what, pieces in (("torch computes", replaced), ("unchecked:", unchecked))
        if pieces
    )


def describe_finding(finding: Finding) -> str:
    """The finding about a piece in one line."""
    is_second = finding.piece in SECOND_WAYS
    rival = "the other way" if is_second else "torch"
    is_measured = finding.times > 0 and finding.state in ("good", "slower")
    times = f", {finding.times:.1f} times as fast as {rival}" if is_measured else ""
    if is_second and finding.is_taken:
        return f"{finding.piece}: used{f' for {finding.why}' if finding.why else ''}{times}"
    what: str = finding.state
    if not finding.is_taken:
        what += ", so not used" if is_second else ", so torch computes them"
    return f"{finding.piece}: {what}{times}" + (f" ({finding.why})" if finding.why else "")


def describe_machine() -> str:
    """This GPU, and the versions of everything that its kernels depend on."""
    return ", ".join(
        (
            torch.cuda.get_device_name(),
            f"driver {_driver()}",
            f"torch {torch.__version__}",
            f"triton {triton_version()}",
            f"localllm {__version__} ({sources_fingerprint()})",
        )
    )


def describe_shape(request: CheckRequest) -> str:
    """Everything that determines a model's operators; models of one shape share a verdict."""
    sizes = request.sizes
    types = [str(each).removeprefix("torch.") for each in (sizes.dtype, sizes.kv_dtype)]
    deterministic = ", deterministic" if request.deterministic else ""
    return (
        f"{sizes.architecture.describe()}, {types[0]} with {types[1]} in blocks of "
        f"{sizes.block_size}, weights {_kinds(request)}{deterministic}"
    )


def _kinds(request: CheckRequest) -> str:
    """How the first linear of each kind, and the head, are stored: format and dtypes, and the
    checkpoint's settings for zeros and the order of inputs.
    """
    if isinstance(request.weights, RandomWeights):
        return f"drawn, {request.weights.kind}"
    architecture = request.sizes.architecture
    groups = [(layer, group) for layer, group in architecture.groups() if group.copy == 0]
    places = {group: layer for layer, group in reversed(groups)}
    first = [f"{layer}.{name}" for group, layer in places.items() for name in group.names]
    found = request.weights.quantized
    kinds = [_kind(found[name]) if name in found else "plain" for name in [*first, HEAD]]
    told = json.dumps(architecture.quantization, sort_keys=True, default=str)
    if found:
        kinds.append(f"config {hashlib.sha256(told.encode()).hexdigest()[:8]}")
    biases = sum(f"{name}.bias" in request.weights.plain for name in first)
    return ", ".join(dict.fromkeys([*kinds, f"{biases} biases"]))


def _kind(linear: StoredLinear) -> str:
    types = sorted(f"{suffix} {info.dtype}" for suffix, info in linear.parts.items())
    return f"{linear.scheme} of {', '.join(types)}"


def _driver() -> str:
    """The version of the GPU's driver, or the CUDA version that it supports."""
    try:
        words = _DRIVER.read_text().partition("\n")[0].split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        version = getattr(torch._C, "_cuda_getDriverVersion", None)
        return f"for CUDA {version()}" if version else "unknown"
