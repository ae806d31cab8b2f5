"""The programs that `localllm launch` knows, and how each is pointed at a server.

Where a program takes its settings from variables or flags, none of its files is touched. Sources:
the documentation of Claude Code ("Environment variables", "LLM gateway"), Codex ("Advanced
configuration: custom model providers"), OpenCode ("Config", "Providers"), aider ("OpenAI compatible
APIs"), Continue ("config.yaml reference"), Zed ("LLM providers: OpenAI API compatible") and llm
("Other models: OpenAI-compatible models").
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.launch.settings import Endpoint, FileChange, Settings
from localllm.user.places import launch_folder

# Of a context, at most this share is an answer; programs that ask for a number get it.
_ANSWER_SHARE = 4
KEY_VARIABLE = "LOCALLLM_API_KEY"


@dataclass(frozen=True, slots=True)
class Program:
    """A program: `executables`: its names, of which one must be on the path; `install`: how to get
    it; `returns`: it returns at once and goes on in a window.
    """

    name: str
    title: str
    executables: tuple[str, ...]
    install: str
    settings: Callable[[Endpoint], Settings]
    returns: bool = False


def _claude(at: Endpoint) -> Settings:
    models = ("OPUS", "SONNET", "HAIKU")
    return Settings(
        ["claude"],
        {
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_AUTH_TOKEN": at.shown_key,
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": at.model,
            **{f"ANTHROPIC_DEFAULT_{each}_MODEL": at.model for each in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": at.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(at.context_length),
            # A line that changes with every request, at the head of its prompts.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(at: Endpoint) -> Settings:
    provider: dict[str, Any] = {
        "name": "localllm",
        "base_url": f"{at.url}/v1",
        "wire_api": "responses",
    }
    if at.key:
        provider["env_key"] = KEY_VARIABLE
    flags = {
        "model_provider": "localllm",
        "model": at.model,
        "model_context_window": at.context_length,
        # Searches that OpenAI's servers would do.
        "web_search": "disabled",
        **{f"model_providers.localllm.{name}": value for name, value in provider.items()},
    }
    settings = [f"{name}={json.dumps(value)}" for name, value in flags.items()]
    command = ["codex", *(part for each in settings for part in ("-c", each))]
    return Settings(command, {KEY_VARIABLE: at.key} if at.key else {})


def _opencode(at: Endpoint) -> Settings:
    limit = {"context": at.context_length, "output": at.context_length // _ANSWER_SHARE}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localllm",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": at.shown_key},
        "models": {at.model: {"name": at.model, "limit": limit}},
    }
    model = f"localllm/{at.model}"
    config = {"provider": {"localllm": provider}, "model": model, "small_model": model}
    return Settings(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(at: Endpoint) -> Settings:
    return Settings(
        ["aider", "--model", f"openai/{at.model}", "--no-show-model-warnings"],
        {"OPENAI_API_BASE": f"{at.url}/v1", "OPENAI_API_KEY": at.shown_key},
    )


def _continue(at: Endpoint) -> Settings:
    path = launch_folder() / "continue.yaml"
    # JSON is YAML.
    model = {
        "name": at.model,
        "provider": "openai",
        "model": at.model,
        "apiBase": f"{at.url}/v1",
        "apiKey": at.shown_key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": at.context_length},
    }
    config = {"name": "localllm", "version": "1.0.0", "schema": "v1", "models": [model]}
    text = json.dumps(config, indent=2) + "\n"
    return Settings(
        ["cn", "--config", str(path)], files=[FileChange(path, text, text, is_own=True)]
    )


def _zed(at: Endpoint) -> Settings:
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(folder) / "zed" / "settings.json"
    model = {"name": at.model, "display_name": at.model, "max_tokens": at.context_length}
    provider = {"api_url": f"{at.url}/v1", "available_models": [model]}
    addition = {"language_models": {"openai_compatible": {"localllm": provider}}}
    shown = json.dumps(addition, indent=2) + "\n"
    return Settings(
        ["zed"], {KEY_VARIABLE: at.shown_key}, [FileChange(path, _merged(path, addition), shown)]
    )


def _llm(at: Endpoint) -> Settings:
    # A folder of localllm's own: its key is given as an argument otherwise, which all users of the
    # machine can read, and the user's own files stay as they are.
    folder = launch_folder() / "llm"
    name = f"localllm-{at.model}"
    model = {"model_id": name, "model_name": at.model, "api_base": f"{at.url}/v1"}
    files: dict[str, Any] = {
        "extra-openai-models.yaml": [model | {"api_key_name": "localllm"}],  # JSON is YAML
        "keys.json": {"localllm": at.shown_key},
    }
    texts = {folder / file: json.dumps(text, indent=2) + "\n" for file, text in files.items()}
    return Settings(
        ["llm", "chat", "-m", name],
        {"LLM_USER_PATH": str(folder)},
        [FileChange(path, text, text, is_own=True) for path, text in texts.items()],
    )


def _merged(path: Path, addition: dict[str, Any]) -> str | None:
    """The settings in `path` with `addition`; None if they are no plain JSON, with comments say."""
    if not path.exists():
        return json.dumps(addition, indent=2) + "\n"
    try:
        there = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError):
        return None
    return json.dumps(_with(there, addition), indent=2) + "\n" if isinstance(there, dict) else None


def _with(there: Any, addition: Any) -> Any:
    if not (isinstance(there, dict) and isinstance(addition, dict)):
        return addition
    return {**there, **{name: _with(there.get(name), value) for name, value in addition.items()}}


PROGRAMS = {
    each.name: each
    for each in (
        Program(
            "claude",
            "Claude Code",
            ("claude",),
            "npm install -g @anthropic-ai/claude-code",
            _claude,
        ),
        Program("codex", "Codex", ("codex",), "npm install -g @openai/codex", _codex),
        Program("opencode", "OpenCode", ("opencode",), "npm install -g opencode-ai", _opencode),
        Program("aider", "aider", ("aider",), "pip install aider-chat", _aider),
        Program("continue", "Continue", ("cn",), "npm install -g @continuedev/cli", _continue),
        Program("zed", "Zed", ("zed", "zeditor"), "https://zed.dev", _zed, returns=True),
        Program("llm", "llm", ("llm",), "pip install llm", _llm),
    )
}
