"""The page at `/`: its files, and the headers that keep everything else out of it."""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

# What a browser may load from /page/, and as what.
_TYPES = {
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        (
            "page.js",
            "answers.js",
            "code.js",
            "colours.js",
            "conversation.js",
            "elements.js",
            "list.js",
            "markdown.js",
            "server.js",
            "vendor/highlight.js",
            "vendor/markdown-it.js",
        ),
        "text/javascript",
    ),
}
PAGE_PATHS = frozenset(f"/page/{name}" for name in _TYPES)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
# For what colours code, in a thread of its own: it loads its library and can do nothing else.
_WORKER_POLICY = "default-src 'none'; script-src 'self'"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    etag: str


def page_response() -> Response:
    """The page. Scripts and styles that carry this answer's nonce are loaded and nothing else, no
    text becomes HTML or a script, and no other page may frame it (W3C, "Content Security Policy
    Level 3" and "Trusted Types").
    """
    nonce = secrets.token_urlsafe(16)
    policy = {
        "default-src": "'none'",
        "script-src": f"'nonce-{nonce}'",
        "style-src": f"'nonce-{nonce}'",
        "worker-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "own-worker",
    }
    told = "; ".join(f"{name} {value}" for name, value in policy.items())
    text = _read("page.html").content.decode().replace("{nonce}", nonce)
    headers = {**_HEADERS, "content-security-policy": told, "cache-control": "no-store"}
    return Response(text, headers=headers, media_type="text/html")


async def page_file(request: Request) -> Response:
    """A file of the page, one of PAGE_PATHS."""
    name = request.url.path.removeprefix("/page/")
    file = _read(name)
    headers = {**_HEADERS, "etag": file.etag, "content-security-policy": _WORKER_POLICY}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=_TYPES[name])


@cache
def _read(name: str) -> _File:
    content = files("localllm.server").joinpath("page", *name.split("/")).read_bytes()
    return _File(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
