"""Chat templates: one sandboxed renderer for text that comes from a stranger.

A template is a small program in Jinja. It runs in jinja2's immutable sandbox, which blocks the way
to Python's internals, and under limits that the sandbox lacks: a deadline, checked at every line,
and caps on what a single operation can blow up (`*`, `**`, `%`, `+`, string methods, filters), on
integers and on the output. Lists that hold themselves many times over are weighed before they
become text. jinja2's own `range` is capped at 100,000 by the sandbox.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from types import FrameType
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.errors import TemplateError

RENDER_TIME_S = 1.5
MAX_INTEGER_BITS = 256
MAX_ARGUMENT = 100_000
MIN_MAX_CHARS = 1 << 20
ITEM_WEIGHT = 16  # characters that anything but a string is taken to have

# Filters that make no text of what they are given.
_STRUCTURAL_FILTERS = frozenset(
    "length count first last list map items default d select reject selectattr rejectattr".split()  # noqa: SIM905
)
_HINT = "report the template to the model's publisher, or use --raw to send the prompt as it is"


class _LimitError(Exception):
    """A template went over a limit."""


class _RaisedError(Exception):
    """A template called raise_exception."""


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The prompt text of a conversation, as the model was trained to read it.

    `variables` are what else the template knows (`bos_token`, `enable_thinking`, …).

    Raises: TemplateError for a syntax error, a refusal by the template itself
    (`raise_exception`), an escape attempt, or a template that goes over time or size.
    """
    given = {"messages": messages, "tools": tools, **variables}
    max_chars = MIN_MAX_CHARS + 4 * (len(template) + len(json.dumps(given, default=str)))
    environment = _make_environment(max_chars)
    try:
        with _deadline(RENDER_TIME_S):
            compiled = environment.from_string(template)
            pieces, length = [], 0
            for piece in compiled.generate(add_generation_prompt=add_generation_prompt, **given):
                length += len(piece)
                if length > max_chars:
                    raise _LimitError(f"the output is over {max_chars:,} characters")
                pieces.append(piece)
    except _RaisedError as error:
        raise TemplateError(
            f"the chat template refuses this conversation: {error}", hint="change the messages"
        ) from error
    except _LimitError as error:
        raise TemplateError(f"the chat template was stopped: {error}", hint=_HINT) from error
    except SecurityError as error:
        raise TemplateError(f"the chat template tried to escape: {error}", hint=_HINT) from error
    except JinjaError as error:
        line = getattr(error, "lineno", None)
        raise TemplateError(
            f"the chat template is broken: {error}",
            where=f"line {line} of the template" if line else "",
            hint=_HINT,
        ) from error
    except (RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template was stopped: {error!r:.100}", hint=_HINT) from error
    except Exception as error:  # a template is a stranger's program: it can raise anything
        raise TemplateError(f"the chat template failed: {error!r:.200}", hint=_HINT) from error
    return "".join(pieces)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_LimitError` at the first line of Python that runs after `seconds`.

    A trace function needs no thread, signal or process, and a template's Python code passes one
    every few microseconds; what runs in C is bounded by the caps on sizes.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _LimitError(f"it ran for more than {seconds:g} s")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


class _CodeGenerator(CodeGenerator):
    """Sends `~` through the environment, which the sandbox does not."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        """Write a checked concatenation."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with caps on sizes."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int, **options: Any) -> None:
        super().__init__(finalize=self.weighed, **options)
        self.max_chars = max_chars

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
            self._check_arguments("%", right if isinstance(right, tuple) else (right,))
            self.weighed(right)
        return self.checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            if function.__name__ == "join":
                args = tuple(self._listed(argument) for argument in args)
            self._check_string_method(owner, function.__name__, (*args, *kwargs.values()))
        return self.checked(super().call(context, function, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; the sandbox would give an undefined value, which prints as nothing."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, with bounded widths and arguments."""
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            self._check_string_method(value.__self__, "format", (*args, *kwargs.values()))
            return str(self.checked(run(*args, **kwargs)))

        return guarded

    def concatenate(self, parts: Sequence[Any]) -> str:
        """What `~` gives."""
        text = "".join([str(self.weighed(part)) for part in parts])
        self._check_length(len(text))
        return text

    def weighed(self, value: Any) -> Any:
        """`value`, if it is not too long once it is text; a shared part counts each time."""
        weight, stack = 0, [value]
        while stack:
            item = stack.pop()
            weight += len(item) if isinstance(item, str) else ITEM_WEIGHT
            if weight > self.max_chars:
                raise _LimitError(f"a value of over {self.max_chars:,} characters")
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
        return value

    def checked(self, value: Any) -> Any:
        """`value`, if it is not too large."""
        if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > self.max_chars:
            raise _LimitError(f"a value is over {self.max_chars:,} characters or items")
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise _LimitError(f"a number is over {MAX_INTEGER_BITS} bits")
        return value

    def _listed(self, value: Any) -> Any:
        """A generator or range as a list that is not too long, so that it can be weighed."""
        if isinstance(value, (Iterator, range)):
            return list(islice(value, self.max_chars))
        return value

    def _check_product(self, left: Any, right: Any) -> None:
        for sequence, times in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(times, int):
                self._check_length(len(sequence) * times)

    def _check_length(self, length: int) -> None:
        if length > self.max_chars:
            raise _LimitError(f"a text of {length:,} characters")

    def _check_format(self, text: str) -> None:
        digits = ""
        for char in text:
            digits = digits + char if char.isdigit() else ""
            if digits and int(digits) > MAX_ARGUMENT:
                raise _LimitError(f"a format of width {digits:.20}")

    def _check_arguments(self, name: str, arguments: Sequence[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT:
                raise _LimitError(f"{name} with the number {argument!r:.20}")

    def _check_string_method(self, owner: str, name: str, arguments: Sequence[Any]) -> None:
        """Bound the result's length before it is built."""
        self._check_arguments(name, arguments)
        if name == "format":
            self._check_format(owner)
            self.weighed(arguments)
        texts = [argument for argument in arguments if isinstance(argument, str)]
        if name == "replace" and len(texts) == 2:
            found = owner.count(texts[0])
            self._check_length(len(owner) + found * len(texts[1]))
        elif name == "translate":
            raise _LimitError("str.translate is not available in templates")
        elif name == "join" and arguments and hasattr(arguments[0], "__len__"):
            self._check_length(len(owner) * len(arguments[0]))
        elif name == "expandtabs":
            tab = next((a for a in arguments if isinstance(a, int)), 8)
            self._check_length(len(owner) + owner.count("\t") * max(tab, 0))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        bits = max(base.bit_length(), 1) * abs(exponent)
        if bits > MAX_INTEGER_BITS:
            raise _LimitError(f"a power of over {MAX_INTEGER_BITS} bits")


def _guard_filter(environment: _Environment, name: str, run: Callable[..., Any]) -> Any:
    """A filter whose number arguments and result are bounded."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        # With pass_context and the like the first argument is jinja2's own.
        texts = [v for v in values if isinstance(v, str)]
        environment._check_arguments(name, values)
        if name not in _STRUCTURAL_FILTERS:
            environment.weighed([v for v in values if isinstance(v, (str, Mapping, list, tuple))])
        if name == "replace" and len(texts) >= 3:
            environment._check_string_method(texts[0], "replace", texts[1:3])
        if name == "format" and texts:
            environment._check_format(texts[0])
        if name == "join":
            args = tuple(environment._listed(argument) for argument in args)
            values = [*args, *kwargs.values()]
            items = next((v for v in values if isinstance(v, (list, tuple))), ())
            environment._check_length(len(texts[-1] if texts else "") * len(items))
        return environment.checked(run(*args, **kwargs))

    guarded.__dict__.update(getattr(run, "__dict__", {}))  # jinja2 marks what a filter wants passed
    return guarded


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what was trained on; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body, drop the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment(max_chars: int) -> _Environment:
    environment = _Environment(
        max_chars,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.filters = {
        name: _guard_filter(environment, name, run) for name, run in environment.filters.items()
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates get it: no HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _RaisedError(message)


def _strftime_now(format_string: str) -> str:
    if len(format_string) > 100:
        raise _LimitError("a long time format")
    return datetime.now().strftime(format_string)
