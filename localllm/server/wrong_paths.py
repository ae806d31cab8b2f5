"""What to tell a client that asks for a path which is not here: the one that it may have meant."""

from collections.abc import Sequence
from difflib import get_close_matches

# Paths of other servers' own APIs, by the route here that does the same.
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",  # Ollama
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/ps": "/health",
    "/api/version": "/openapi.json",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/completion": "/v1/completions",  # llama.cpp
    "/embedding": "/v1/embeddings",
    "/infill": "/v1/completions with a suffix",
    "/props": "/v1/models",
    "/slots": "/metrics",
    "/generate": "/v1/completions",  # TGI
    "/version": "/openapi.json",  # vLLM
    "/ping": "/health",
    "/healthz": "/health",
    "/v2/rerank": "/v1/rerank",  # Cohere
}
_BASES = "the base URL ends with /v1 for OpenAI's clients, without it for Anthropic's"
_ALIKE = 0.8


def not_found(path: str, routes: Sequence[str]) -> str:
    """The message for a path that is not one of `routes`."""
    shown = path[:100]
    if path == "/v1":
        return "this is the base URL of OpenAI's clients; they add a route, such as /v1/models"
    meant = _nearest(shown, routes)
    told = f"there is nothing at {shown}; "
    return told + (f"{meant} may be what you want; {_BASES}" if meant else _BASES)


def _nearest(path: str, routes: Sequence[str]) -> str | None:
    if path in _ELSEWHERE:
        return _ELSEWHERE[path]
    for tried in (f"/v1{path}", path.replace("/v1/v1/", "/v1/", 1), path.removeprefix("/v1")):
        if tried in routes:
            return tried
    return next(iter(get_close_matches(path, routes, 1, _ALIKE)), None)
