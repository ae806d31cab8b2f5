"""Commands of other programs (Ollama, llama.cpp, vLLM, hf), and what is typed here instead."""

_CHAT, _PULL, _SHOW, _RM = "chat MODEL PROMPT", "pull MODEL", "show MODEL", "rm MODEL"
_SERVE, _QUANTIZE, _DOCTOR = "serve MODEL", "quantize MODEL", "doctor"
_LOGIN = "hf auth login, or HF_TOKEN in the environment"
_AT_SERVER = "localllm serve MODEL, whose API has it: "
# Without the program's name where it is a command of ours.
_OURS = {
    **dict.fromkeys(("generate", "complete", "completion", "ask", "prompt", "infer"), _CHAT),
    **dict.fromkeys(("llama-cli", "llama-run", "cli", "repl", "import"), _CHAT),
    **dict.fromkeys(("run-batch", "batch"), "chat MODEL --each-line"),
    **dict.fromkeys(("download", "fetch", "get", "add", "install"), _PULL),
    **dict.fromkeys(("info", "inspect", "describe", "model", "card"), _SHOW),
    **dict.fromkeys(("delete", "del", "remove", "uninstall"), _RM),
    **dict.fromkeys(("start", "server", "llama-server", "api", "api-server"), _SERVE),
    **dict.fromkeys(("create", "convert", "quantise", "llama-quantize"), _QUANTIZE),
    **dict.fromkeys(("benchmark", "llama-bench", "perf", "speed"), "bench MODEL"),
    **dict.fromkeys(("perplexity", "llama-perplexity", "evaluate", "kl"), "eval MODEL --text FILE"),
    **dict.fromkeys(("env", "check", "collect-env", "diagnose", "health", "status"), _DOCTOR),
    **dict.fromkeys(("kill", "unload", "down"), "stop"),
    **dict.fromkeys(("load", "up"), "chat MODEL --keepalive 1h"),
    **dict.fromkeys(("search", "catalog", "catalogue", "fit"), "plan"),
    **dict.fromkeys(("models", "list-models"), "ls"),
    **dict.fromkeys(("history", "chats", "resume"), "sessions"),
    **dict.fromkeys(("settings", "set"), "config"),
    **dict.fromkeys(("scan-cache", "delete-cache", "prune"), "cache"),
}
_OTHERS = {
    **dict.fromkeys(("push", "upload"), "hf upload ORG/NAME FOLDER; localllm uploads nothing"),
    **dict.fromkeys(
        ("cp", "copy", "alias", "rename"),
        "an entry of your own in models.toml: localllm config path --catalog",
    ),
    **dict.fromkeys(("login", "signin", "auth", "whoami", "logout", "signout"), _LOGIN),
    **dict.fromkeys(("embed", "embedding", "embeddings"), f"{_AT_SERVER}POST /v1/embeddings"),
    **dict.fromkeys(("rerank", "score"), f"{_AT_SERVER}POST /v1/rerank"),
    **dict.fromkeys(("tokenize", "llama-tokenize"), f"{_AT_SERVER}POST /tokenize"),
    "detokenize": f"{_AT_SERVER}POST /detokenize",
    **dict.fromkeys(("update", "upgrade"), "pip install --upgrade localllm"),
}


def instead_of(command: str) -> str | None:
    """What to type in the place of another program's command; None for an unknown word."""
    plain = command.lower().replace("_", "-")
    return f"localllm {_OURS[plain]}" if plain in _OURS else _OTHERS.get(plain)
