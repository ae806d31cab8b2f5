"""Run a language model on your own machine."""

from typing import TYPE_CHECKING, Any

from localllm.user.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from localllm.answer.llm import LLM
    from localllm.schedule.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    # Imported on first use: `import localllm` and `localllm --help` must not wait for torch.
    if name == "LLM":
        from localllm.engine.threads import let_torch_sleep

        let_torch_sleep()
        from localllm.answer.llm import LLM

        return LLM
    if name == "SamplingParams":
        from localllm.schedule.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
