"""Checks that refuse a setting which its flag would refuse at every start."""

from collections.abc import Callable
from functools import partial
from typing import Any

from localllm.answer.overflow import OVERFLOW_POLICIES
from localllm.cli.draw.output import COLOURS
from localllm.cli.draw.render import RENDER_MODES
from localllm.cli.flags import values as flag_values
from localllm.cli.flags.engine_flags import DraftFlags
from localllm.cli.flags.sampling_flags import SETTINGS
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import resolve_model
from localllm.schedule.sampling_params import SamplingParams
from localllm.server.volatile_lines import parse_rule


def _in_field(kind: type, field: str, value: object) -> None:
    kind(**{field: value})


def _check_speculation(text: str) -> None:
    config = DraftFlags(spec=text).config()
    for name in (config.draft_model, config.eagle_head):
        if name is not None:
            resolve_model(name)


# By the name of the setting.
CHECKS: dict[str, Callable[[Any], object]] = {
    "color": lambda text: flag_values.parse_choice("color", text, COLOURS),
    "cache_disk": lambda text: flag_values.parse_size(text, "cache-disk"),
    "ctx": flag_values.parse_context,
    "expert_memory": flag_values.parse_expert_memory,
    "keepalive": flag_values.parse_keepalive,
    "overflow": lambda text: flag_values.parse_choice("overflow", text, OVERFLOW_POLICIES),
    "render": lambda text: flag_values.parse_choice("render", text, RENDER_MODES),
    "reserve": lambda text: flag_values.parse_size(text, "reserve"),
    "keep_responses": lambda text: flag_values.parse_size(text, "keep-responses"),
    "snapshot_memory": lambda text: flag_values.parse_size(text, "snapshot-memory"),
    "spec": _check_speculation,
    "spec_max": lambda count: DraftFlags(spec_max=count).config(),
    "spec_ngram": lambda text: DraftFlags(spec_ngram=text).config(),
    "volatile": lambda rules: [parse_rule(rule) for rule in rules],
    "think": flag_values.parse_think,
    **{
        name.replace("-", "_"): partial(_in_field, SamplingParams, field)
        for name, (field, _) in SETTINGS.items()
    },
    **{
        name: partial(_in_field, EngineConfig, name)
        for name in (
            "backend",
            "device",
            "dtype",
            "gpu_memory_utilization",
            "kv_cache_dtype",
            "max_num_batched_tokens",
            "max_num_seqs",
            "state_dtype",
            "threads",
        )
    },
}
