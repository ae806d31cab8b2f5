"""Hostile inputs, made from a seed: the same ones in every run."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, "", "a", "\x00", "é" * 50,
    "<|im_end|>", "x" * 10_000, [], {}, [[]], [None], {"a": None}, [1] * 1000, "1", "NaN",
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "tools": [TOOL]}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}},
    ),
    ("/v1/completions", {"prompt": ["Once", [5, 6]], "max_tokens": 2, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "a+"}}),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


def mutated(value: Any, random: Random) -> Any:
    """A copy in which one to three places are something else."""
    found = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places = list(_places(found))
        if not places:
            return _junk(random)
        holder, key = random.choice(places)
        match random.choice(["junk", "junk", "drop", "wrap", "repeat", "add"]):
            case "drop":
                del holder[key]
            case "wrap":
                holder[key] = [holder[key]]
            case "repeat":
                holder[key] = [holder[key]] * random.randint(2, 50)
            case "add" if isinstance(holder, dict):
                holder[random.choice(["", "a", "\u0000", "__proto__"])] = _junk(random)
            case _:
                holder[key] = _junk(random)
    return found


def _junk(random: Random) -> Any:
    return copy.deepcopy(random.choice(JUNK))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield value, key
        yield from _places(each)


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies of requests; one in five has bytes exchanged too."""
    random = Random(seed)
    for _ in range(count):
        path, body = random.choice(BODIES)
        content = json.dumps(mutated(body, random)).encode("utf-8", "surrogatepass")
        if random.random() < 0.2:
            content = with_bytes_exchanged(content, random)
        yield path, content


def with_bytes_exchanged(data: bytes, random: Random) -> bytes:
    """Some bytes are others, are cut off, or come twice."""
    found = bytearray(data)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(found) + 1)
        match random.choice(["exchange", "exchange", "cut", "repeat", "insert"]):
            case "exchange" if at < len(found):
                found[at] = random.randrange(256)
            case "cut":
                del found[at:]
            case "repeat":
                found[at:at] = found[max(0, at - random.randint(1, 40)) : at]
            case _:
                found[at:at] = random.randbytes(random.randint(1, 4))
        if not found:
            return b""
    return bytes(found)


def raw_requests(count: int, seed: int) -> Iterator[bytes]:
    """Bytes that are nearly HTTP requests."""
    random = Random(seed)
    whole = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 15\r\nConnection: close\r\n\r\n{"prompt": "a"}'
    )
    chunked = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nf\r\n{"prompt": "a"}\r\n0\r\n\r\n'
    )
    for _ in range(count):
        request = random.choice(
            [whole, chunked, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"]
        )
        yield with_bytes_exchanged(request, random)


def grammars(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`structured_outputs`: forms that are sound, broken, or larger than anybody needs."""
    random = Random(seed)
    for number in range(count):
        match random.randrange(6):
            case 0:
                yield {"json": _schema(random, 3)}
            case 1:
                yield {"json": mutated(_schema(random, 3), random)}
            case 2:
                yield {"regex": _regex(random, 4)}
            case 3:
                yield {"choice": [_text(random) for _ in range(random.randint(1, 20))]}
            case 4:
                yield {"grammar": _lark(random)}
            case _:
                yield _bomb(random, number)


def _text(random: Random) -> str:
    parts = ["a", "yes", "no", " ", '"', "\\", "<|im_end|>", "<|im_start|>", "é", "🦊", "\n", "1"]
    return "".join(random.choice(parts) for _ in range(random.randint(1, 6)))


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = random.choice([*kinds, "object", "array", "anyOf"] if depth else kinds)
    match kind:
        case "object":
            names = [_text(random) for _ in range(random.randint(0, 4))]
            return {
                "type": "object",
                "properties": {name: _schema(random, depth - 1) for name in names},
                "required": names[: random.randint(0, len(names))],
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": _schema(random, depth - 1), "maxItems": 4}
        case "anyOf":
            return {"anyOf": [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
        case "enum":
            return {"enum": [_text(random) for _ in range(random.randint(1, 5))]}
        case "const":
            return {"const": _text(random)}
        case "pattern":
            return {"type": "string", "pattern": "^" + _regex(random, 2) + "$"}
        case "integer":
            return {"type": "integer", "minimum": random.randint(-50, 0), "maximum": 99}
        case "string":
            return {"type": "string", "maxLength": random.randint(0, 20)}
    return {"type": kind}


def _regex(random: Random, depth: int) -> str:
    atoms = ["a", "b", "[a-z]", "[0-9]", "x{1,3}", "é", r"\d", "[^a]", "(yes|no)"]
    if not depth:
        return random.choice(atoms)
    inner = _regex(random, depth - 1)
    wrapped = [
        f"({inner})?", f"({inner}){{1,3}}", f"{inner}{random.choice(atoms)}", f"({inner}|b)",
    ]  # fmt: skip
    return random.choice(wrapped)


def _lark(random: Random) -> str:
    sound = 'start: "It is " /[0-9]{2}/ " degrees" SHADE?\nSHADE: " in the sun" | " <|im_end|>"'
    if random.random() < 0.4:
        return sound
    return with_bytes_exchanged(sound.encode(), random).decode("utf-8", "replace")


def _bomb(random: Random, number: int) -> dict[str, Any]:
    size = random.choice([10, 100, 1000])
    title = f"bomb {number}"
    bombs: list[dict[str, Any]] = [
        {"json": {"type": "integer", "multipleOf": 215656441 + number, "title": title}},
        {"regex": f"(a{{{9 * size % 997}}}){{{size}}}"},
        {"regex": "(" * size + "a" + ")" * size},
        {"regex": "(a|aa)*" * (size // 10) + "b"},
        {"regex": f"([a-z]{{0,{size}}}[0-9]){{0,{size}}}"},
        {"json": {"const": "c" * 200 * size, "title": title}},
        {"json": {"enum": [f"{title} {i}" for i in range(5 * size)]}},
        {"json": {"type": "object", "properties": {f"p{i}": True for i in range(12 * size)}}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": size * 1000}},
        {"json": {"type": "string", "minLength": size * 500, "title": title}},
        {"json": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(size)]}},
        {"grammar": "start: a\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(size)) + "a: a a"},
        {"grammar": f'start: x{{{size}}}\nx: "a"{{{size}}}'},
        {"choice": ["q" * size + str(i) for i in range(size)]},
    ]
    return random.choice(bombs)


TEMPLATES = [
    "{{ dict.fromkeys(range(0, N*(2**61-1), 2**61-1)) | length }}",
    "{{ ('%(' * N) % 1 }}",
    "{{ ('a' * N).strip('b' * N ~ 'a') | length }}",
    "{% if 0 %}" + "{% elif 0 %}" * 2000 + "{% endif %}",
    "{% for a in range(N) %}{% for b in range(N) %}{{ a*b }}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ messages | map(attribute='content') | join('x' * N) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 9 ** N }}",
    "{{ 'a'.replace('', 'b' * N) }}",
    "{{ (range(N) | list) * N }}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{{ messages | tojson(indent=N) }}",
    "{{ '{:>N}'.format(1) }}",
    "{{ messages[N] }}",
    "{% include 'x' %}",
    "{{ raise_exception('N') }}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
]


def templates(count: int, seed: int) -> Iterator[str]:
    """Chat templates that are sound, broken, or written to hang or to fill memory."""
    random = Random(seed)
    for _ in range(count):
        template = random.choice(TEMPLATES).replace("N", str(random.choice([3, 1000, 400_000])))
        if random.random() < 0.3:
            template = with_bytes_exchanged(template.encode(), random).decode("utf-8", "replace")
        yield template
