"""How `--help` is laid out: a command's flags by what they are about, whole sentences for each
command.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from localllm.cli.origins import origin_of
from localllm.errors import RequestError

# Names that other tools have for a command; each is understood, and listed beside it.
ALIASES = {"run": "chat", "list": "ls"}
# Parameters by section, in order; those of no section stand last.
_SECTIONS = {
    "Model and prompt": """words model model_flag prompt_flag file system system_file raw
        parse_special think remote api_key""",
    "Answer": """json_output stream_json extract_code fail_on_length why logprobs hide_thinking
        render color""",
    "Form of the answer": "format_ json_schema regex grammar",
    "Conversation": "session_name continue_last no_save overflow keepalive",
    "Sampling": """temp top_k top_p min_p repeat_penalty presence_penalty frequency_penalty
        logit_bias seed stop ignore_eos max_tokens greedy""",
    "Engine": """ctx device threads dtype backend kv_cache_dtype deterministic self_check
        gpu_memory_utilization reserve max_num_seqs max_num_batched_tokens no_prefix_cache
        cache_disk cache_dir""",
    "Drafts": "spec spec_max spec_ngram",
}
_SECTION_OF = {name: title for title, names in _SECTIONS.items() for name in names.split()}
# Fewer flags than these are read faster in one list.
_FEW = 24


# Flags of which one at most may be given.
_EXCLUSIVE = (
    ("format_", "json_schema", "regex", "grammar"),
    ("greedy", "temp"),
    ("system", "system_file"),
)


def _prefer_what_was_typed(ctx: Any) -> None:
    """A variable or a setting gives way to a flag that excludes it."""
    for names in _EXCLUSIVE:
        sources = {name: ctx.get_parameter_source(name) for name in names if name in ctx.params}
        kinds = {name: source.name for name, source in sources.items() if source is not None}
        if "COMMANDLINE" in kinds.values():
            for name, kind in kinds.items():
                if kind in ("ENVIRONMENT", "DEFAULT_MAP"):
                    ctx.params[name] = False if isinstance(ctx.params[name], bool) else None


class Command(TyperCommand):
    """A command whose help has its flags in sections, where they are many, and whose errors say of
    a value that nobody typed where it comes from.
    """

    def invoke(self, ctx: Any) -> Any:
        """See typer."""
        _prefer_what_was_typed(ctx)
        try:
            return super().invoke(ctx)
        except RequestError as error:
            error.where = error.where or origin_of(error.param, ctx)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """See typer."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        is_long = sum(param.param_type_name == "option" for param in self.params) >= _FEW
        order = {name: i for i, name in enumerate(_SECTION_OF)}
        params = self.get_params(ctx)
        if is_long:
            params = sorted(params, key=lambda each: order.get(each.name or "", len(order)))
        for param in params:
            row = param.get_help_record(ctx)
            if row is None:
                continue
            title = _SECTION_OF.get(param.name or "", "Options") if is_long else "Options"
            if param.param_type_name == "argument":
                title = "Arguments"
            sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """Commands, each with its other name and the first sentence of its help, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        others = {name: alias for alias, name in ALIASES.items()}
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            names = f"{name}, {others[name]}" if name in others else name
            rows.append((names, _first_sentence(command.help or "")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]
