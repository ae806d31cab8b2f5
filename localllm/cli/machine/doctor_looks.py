"""The checks of `localllm doctor`, one after another."""

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localllm.cli.draw.output import note
from localllm.cli.draw.words import duration, size
from localllm.engine.config import EngineConfig
from localllm.errors import BackendError, LocalLLMError
from localllm.user.settings import default_model
from localllm.user.version import __version__

if TYPE_CHECKING:
    from localllm.operators.verdict import Verdict

_PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "huggingface-hub", "typer", "rich")
_VARIABLES = ("LOCALLLM_", "HF_", "XDG_", "CUDA_", "OMP_")
# Variables whose values are not shown: they hold secrets, or text of the user's.
_UNTOLD = ("TOKEN", "KEY", "SECRET", "PASSWORD", "SYSTEM", "STOP", "SESSION")
_LEAST_FREE_BYTES = 5 << 30
_QUESTION = "What is the KV cache?"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `ok`, `note` if something could be better, `bad` if nothing works."""

    state: Literal["ok", "note", "bad"]
    what: str
    found: str
    remedy: str = ""


def look_at_all() -> Iterator[Finding]:
    """Every check except that of the kernels. A check that fails is a finding too."""
    for look in (
        _versions,
        _system,
        _processor,
        _gpu,
        _self_checks,
        _compiler,
        _memory,
        _disk,
        _caches,
        _settings,
        _sessions,
        _variables,
        _answer,
    ):
        yield from _tried(look)


def _tried(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except LocalLLMError as error:
        state: Literal["note", "bad"] = "bad" if look is _answer else "note"
        yield Finding(state, look.__name__.strip("_"), f"{error.message} {error.where}", error.hint)
    except Exception as error:  # a check that fails is a finding too
        state = "bad" if look is _answer else "note"
        yield Finding(state, look.__name__.strip("_"), f"{type(error).__name__}: {error!s:.300}")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "localllm", f"{__version__}, Python {platform.python_version()}")
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    yield Finding("ok", "packages", ", ".join(found))


def _system() -> Iterator[Finding]:
    yield Finding("ok", "system", platform.platform())


def _processor() -> Iterator[Finding]:
    from localllm.bench.environment import processor_name

    yield Finding("ok", "processor", f"{processor_name()}, {os.cpu_count()} threads")


def _gpu() -> Iterator[Finding]:
    import torch

    from localllm_kernels.compiling.driver import why_no_kernels

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"torch is built for CUDA {built} but sees no GPU" if built else "torch is a CPU build"
        )
        remedy = (
            f"with an NVIDIA GPU: a driver for CUDA {built} or newer (nvidia-smi shows it)"
            if built
            else "with an NVIDIA GPU: pip install torch from its CUDA index"
        )
        yield Finding("note", "GPU", f"none ({why}); models run on the CPU", remedy)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        found = f"{properties.name}, {size(free)} of {size(total)} free, compute {capability}"
        if properties.major < 8:
            yield Finding(
                "note", "GPU", found, "GPUs before compute 8.0 lack bfloat16: --dtype float16"
            )
        else:
            yield Finding("ok", "GPU", f"{found}, CUDA {torch.version.cuda}")
    reason = why_no_kernels()
    if reason is not None:
        problem = "Triton cannot launch kernels, so models use torch's operators, which are slower"
        yield Finding("note", "kernels", problem, reason)


def _self_checks() -> Iterator[Finding]:
    from localllm.operators.verdict import VerdictFile

    for file in VerdictFile.all():
        verdict = file.read()
        if verdict is not None:
            yield from _of_verdict(verdict)


def _of_verdict(verdict: "Verdict") -> Iterator[Finding]:
    from localllm.operators.choice import describe_finding

    yield Finding("ok", "checked", f"{verdict.machine}: models {verdict.shape}")
    for found in verdict.findings():
        # A second way (fragments) that is merely slower, and so not used, is no problem.
        is_note = not found.is_taken and found.state != "slower"
        yield Finding("note" if is_note else "ok", "kernel", describe_finding(found))


def check_gpu(name: str | None) -> Iterator[Finding]:
    """Check the GPU's kernels on the shapes of a model.

    Raises: BackendError without a GPU; as `open_checkpoint`.
    """
    from localllm.cli.models.opening import loading
    from localllm.engine.chosen_device import select_device
    from localllm.engine.chosen_operators import check_request
    from localllm.hub.checkpoint import open_checkpoint
    from localllm.model.weight_check import check_weights
    from localllm.model.weight_files import find_weight_files
    from localllm.operators.choice import find_verdict
    from localllm.operators.listener import Listener
    from localllm_kernels.compiling.driver import why_no_kernels

    config = EngineConfig(device="cuda")
    select_device(config)
    reason = why_no_kernels()
    if reason is not None:
        raise BackendError("Triton cannot launch kernels here", hint=reason)
    found = open_checkpoint(name or default_model(), config)
    weights = check_weights(find_weight_files(found.folder), found.architecture)
    request = check_request(weights, found.architecture, found.engine_config)
    doing: list[str] = []
    with loading(found.name, doing) as line:
        listener = Listener(lambda text: line.say(lambda: note(text, dim=True)), doing.append)
        verdict = find_verdict(request, listener, anew=True)
    if verdict is None:
        raise BackendError(
            "the kernels could not be checked",
            hint="localllm doctor to see what is on this machine",
        )
    yield from _of_verdict(verdict)


def _compiler() -> Iterator[Finding]:
    command = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if command is None:
        yield Finding(
            "note",
            "compiler",
            "none, so models on the CPU use torch's operators, which are slower",
            "install a C compiler (apt install gcc)",
        )
    else:
        yield Finding("ok", "compiler", command)


def _memory() -> Iterator[Finding]:
    import torch

    from localllm.engine.chosen_device import free_bytes

    free = free_bytes(torch.device("cpu"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("ok", "memory", f"{size(free)} of {size(total)} free")


def _disk() -> Iterator[Finding]:
    from localllm.hub.snapshot import cache_root
    from localllm.user.places import cache_folder

    for what, folder in (("hub cache", cache_root("a/b").parent), ("our cache", cache_folder(""))):
        place = folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        found = f"{folder}, {size(free)} free"
        if not os.access(place, os.W_OK):
            yield Finding(
                "note", what, f"{folder} cannot be written", "set HF_HOME or XDG_CACHE_HOME"
            )
        elif free < _LEAST_FREE_BYTES:
            yield Finding("note", what, found, "localllm ls and localllm rm to free space")
        else:
            yield Finding("ok", what, found)


def _caches() -> Iterator[Finding]:
    from localllm.hub.local_models import find_local_models
    from localllm.user.cache_kinds import cache_kinds

    kept = ", ".join(f"{kind.name} {size(kind.num_bytes())}" for kind in cache_kinds(None))
    yield Finding("ok", "kept", kept)
    models = find_local_models().models
    broken = [model for model in models if model.problem is not None]
    found = f"{len(models)} on this machine, {size(sum(model.num_bytes for model in models))}"
    yield Finding("ok", "models", found)
    for model in broken:
        yield Finding(
            "note", "model", f"{model.name}: {model.problem}", f"localllm rm {model.name}"
        )


def _settings() -> Iterator[Finding]:
    from localllm.hub.catalog import load_catalog
    from localllm.user.places import config_file, user_catalog
    from localllm.user.settings import read_settings

    names = ", ".join(read_settings()) or "none"
    yield Finding("ok", "settings", f"{config_file()}: {names}")
    own = f", your own in {user_catalog()}" if user_catalog().exists() else ""
    yield Finding("ok", "catalogue", f"{len(load_catalog())} models{own}")


def _sessions() -> Iterator[Finding]:
    from localllm.chat.store import SessionStore
    from localllm.user.places import sessions_file

    path = sessions_file()
    if not path.exists():
        yield Finding("ok", "sessions", "none yet")
        return
    count = len(SessionStore(path).rows())
    yield Finding("ok", "sessions", f"{count} in {path}, {size(path.stat().st_size)}")


def _variables() -> Iterator[Finding]:
    shown = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            is_untold = any(word in name for word in _UNTOLD)
            shown.append(f"{name} is set" if is_untold else f"{name}={value}")
    yield Finding("ok", "variables", ", ".join(shown) or "none that localllm reads")


def _answer() -> Iterator[Finding]:
    from localllm.answer.llm import LLM

    began = time.monotonic()
    llm = LLM()
    loaded = time.monotonic()
    params = llm.sampling_params(temperature=0.0, max_tokens=24)
    messages = [{"role": "user", "content": _QUESTION}]
    answers = [llm.chat(messages, params)[0] for _ in range(2)]
    texts = [answer.text for answer in answers]
    if not texts[0].strip() or texts[0] != texts[1]:
        yield Finding(
            "bad",
            "answer",
            f"the built-in model answers {texts[0]!r:.80}, then {texts[1]!r:.80}",
            "--backend torch, and please report it with this output",
        )
        return
    took = f"loaded in {duration(loaded - began)}, first token {duration(answers[0].ttft_s)}"
    speed = f"{answers[1].decode_tokens_per_s:,.0f} tokens a second"
    yield Finding("ok", "answer", f"the built-in model answers: {took}, {speed}")
