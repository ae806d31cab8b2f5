"""The page at `/`: one file, and the headers that keep everything else out of it."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response


@cache
def page_response() -> Response:
    """The page. Its own script and style run, by their hashes, and nothing else; it speaks to its
    own origin alone, and no other page may frame it (W3C, "Content Security Policy Level 3").
    """
    text = files("localllm.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _hash_of(tag: str, text: str) -> str:
    [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
