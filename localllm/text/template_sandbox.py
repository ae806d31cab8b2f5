"""The environment that chat templates run in: jinja2's sandbox, with bounds on what it can build.

Everything a template makes passes one of three gates. *Literals, results of calls, filters and
operators* are weighed in depth, with shared parts counted each time, so nothing can be built that
explodes once it is compared, hashed or printed. *Operations whose result can be far larger than
their input* (`*`, `**`, `%`, `format`, `replace`, `join`, padding, indenting) are bounded before
they run. *All of it together* is charged to one budget. Strings have an allow-list of methods;
numbers and bytes have none. The sandbox caps jinja2's own `range` at 100,000.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_INTEGER_BITS = 256
MAX_WIDTH = 100_000  # of padding, indentation, batches
MAX_JSON_INDENT = 16
ITEM_WEIGHT = 16  # characters that anything but a string counts as
BUDGET_FACTOR = 32  # the budget for everything a template makes, in multiples of its longest text

_STRING_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find format index isalnum isalpha "  # noqa: SIM905
    "isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper zfill".split()
)
_WIDTH_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))
_WIDTH_FILTERS = frozenset(("center", "indent", "wordwrap", "truncate", "batch", "slice", "round"))
_REMOVED_FILTERS = ("pprint", "urlize", "xmlattr", "filesizeformat", "random")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?[a-zA-Z%]")


class LimitError(BaseException):
    """A template exceeded a limit. Not an Exception: constant folding in jinja2 swallows those."""


class RefusedError(Exception):
    """A template called raise_exception."""


class _CodeGenerator(CodeGenerator):
    """Writes code in which literals and `~` pass the environment's gates."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        """Write a checked `~`."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """Write a weighed list."""
        self._write_weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a weighed dict; its keys are literals or weighed themselves."""
        self._write_weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Write a weighed tuple, except on the left of an assignment."""
        if node.ctx == "store":
            super().visit_Tuple(node, frame)
        else:
            self._write_weighed(super().visit_Tuple, node, frame)

    def _write_weighed(self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame) -> None:
        self.write("environment.checked(")
        visit(node, frame)
        self.write(")")


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with gates; make one for each rendering, since it holds the budget."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int, **options: Any) -> None:
        super().__init__(finalize=self.checked, **options)
        # Joins captured blocks and macros.
        self.concat = self.join_pieces  # type: ignore[method-assign]
        self.max_chars = max_chars
        self._left = BUDGET_FACTOR * max_chars

    # -- gates

    def checked(self, value: Any) -> Any:
        """`value`, if it is not too large; it is charged to the budget."""
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise LimitError(f"a number of over {MAX_INTEGER_BITS} bits")
        elif isinstance(value, (str, bytes, list, tuple, set, frozenset, Mapping)):
            self._left -= self.weigh(value)
            if self._left < 0:
                raise LimitError("it makes too many values")
        return value

    def weigh(self, value: Any) -> int:
        """About how many characters `value` has as text; shared parts count each time."""
        weight, stack = 0, [value]
        while stack:
            item = stack.pop()
            weight += len(item) if isinstance(item, (str, bytes)) else ITEM_WEIGHT
            if weight > self.max_chars:
                raise LimitError(f"a value of over {self.max_chars:,} characters")
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
        return weight

    def check_length(self, length: int) -> None:
        """Refuse a text of `length` before it is built."""
        if length > self.max_chars:
            raise LimitError(f"a text of {length:,} characters")

    def concatenate(self, parts: Sequence[Any]) -> str:
        """The result of `~`."""
        return str(self.checked("".join([str(self.checked(part)) for part in parts])))

    def join_pieces(self, pieces: Iterable[str]) -> str:
        """The output, or a captured block, as one text."""
        kept, length = [], 0
        for piece in pieces:
            length += len(piece)
            if length > self.max_chars:
                raise LimitError(f"the output is over {self.max_chars:,} characters")
            kept.append(piece)
        return str(self.checked("".join(kept)))

    # -- what jinja2 calls

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow strings the methods on the list, and numbers and bytes none."""
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return not isinstance(obj, (bytes, int, float)) and super().is_safe_attribute(
            obj, attr, value
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; the sandbox would give an undefined value, which prints as nothing."""
        raise SecurityError(f"access to {attribute!r:.60} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run `left operator right` if its result is bounded."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    self.check_length(len(sequence) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if max(left.bit_length(), 1) * abs(right) > MAX_INTEGER_BITS:
                raise LimitError(f"a power of over {MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return self.checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` if its result is bounded."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = tuple(self._listed(argument) for argument in args)
            self._check_method(owner, function.__name__, (*args, *kwargs.values()))
        return self.checked(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, with bounded widths and arguments."""
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            self._check_fields(value.__self__, (args, kwargs))
            return run(*args, **kwargs)

        return guarded

    def guard_filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments and result are bounded."""
        # jinja2 passes some filters its context or itself first.
        offset = 1 if hasattr(run, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            args = tuple(self._listed(argument) for argument in args)
            piped, rest = args[offset], (*args[offset + 1 :], *kwargs.values())
            self.checked(piped)
            self._check_filter(name, piped, rest)
            return self.checked(run(*args, **kwargs))

        guarded.__dict__.update(getattr(run, "__dict__", {}))  # says what to pass to the filter
        return guarded

    # -- bounds before an operation runs

    def _listed(self, value: Any) -> Any:
        """A generator or range as a list of limited length, so that it can be weighed."""
        if isinstance(value, (Iterator, range)):
            return list(islice(value, self.max_chars // ITEM_WEIGHT + 1))
        return value

    def _check_width(self, name: str, arguments: Sequence[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
                raise LimitError(f"{name} with the number {argument:.3g}")

    def _check_join(self, separator: str, items: Any) -> None:
        if isinstance(items, (list, tuple)):
            self.check_length(len(separator) * len(items) + self.weigh(items))

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.check_length(len(text) + text.count(old) * len(new))

    def _check_method(self, text: str, name: str, arguments: Sequence[Any]) -> None:
        if name in _WIDTH_METHODS:
            self._check_width(name, arguments)
        elif name == "replace" and len(arguments) >= 2:
            self._check_replace(text, arguments[0], arguments[1])
        elif name == "join" and arguments:
            self._check_join(text, arguments[0])
        elif name == "expandtabs":
            tab = arguments[0] if arguments and isinstance(arguments[0], int) else 8
            self.check_length(len(text) + text.count("\t") * max(tab, 0))

    def _check_filter(self, name: str, piped: Any, rest: Sequence[Any]) -> None:
        if name in _WIDTH_FILTERS:
            self._check_width(name, rest)
            lines = str(piped).count("\n") + 1
            longest = max((len(text) for text in rest if isinstance(text, str)), default=0)
            width = max((n for n in rest if isinstance(n, int)), default=4)
            # Wrapping can make a line of every character.
            places = len(str(piped)) if name == "wordwrap" else lines
            self.check_length(places * max(longest, width if name == "indent" else 1))
        elif name == "replace" and len(rest) >= 2:
            self._check_replace(str(piped), rest[0], rest[1])
        elif name == "join":
            separators = [text for text in rest if isinstance(text, str)]
            self._check_join(max(separators, key=len, default=""), piped)
        elif name == "format":
            self._check_percent(str(piped), tuple(rest))

    def _check_percent(self, text: str, arguments: Any) -> None:
        widths = [width for pair in _PERCENT_FIELD.findall(text) for width in pair if width]
        self._check_expansion(widths, text.count("%"), arguments)

    def _check_fields(self, text: str, arguments: Any) -> None:
        specs = [spec for _, name, spec, _ in Formatter().parse(text) if name is not None]
        widths = [run for spec in specs for run in re.findall(r"\d+|\{", spec or "")]
        self._check_expansion(widths, len(specs), arguments)

    def _check_expansion(self, widths: list[str], num_fields: int, arguments: Any) -> None:
        """Bound a format: its widths as written, and each field as long as all arguments."""
        if any(not width.isdigit() or len(width) > 6 for width in widths):
            raise LimitError("a format whose width is not a plain number")
        self.check_length(sum(map(int, widths)) + num_fields * self.weigh(arguments))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body, drop the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment(max_chars: int) -> SandboxEnvironment:
    """A fresh environment whose texts have at most `max_chars` characters."""
    environment = SandboxEnvironment(
        max_chars,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )
    environment.filters["tojson"] = _json_filter(environment)
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    environment.filters = {
        name: environment.guard_filter(name, run) for name, run in environment.filters.items()
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    return environment


def _json_filter(environment: SandboxEnvironment) -> Callable[..., str]:
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as transformers' templates get it: no HTML escapes."""
        if indent is not None:
            if not isinstance(indent, int) or not 0 <= indent <= MAX_JSON_INDENT:
                raise LimitError(f"tojson with an indent that is not 0 to {MAX_JSON_INDENT}")
            environment.check_length(environment.weigh(value) * (1 + indent * _depth(value) // 8))
        if separators is not None and sum(map(len, separators)) > 8:
            raise LimitError("tojson with long separators")
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    return to_json


def _depth(value: Any) -> int:
    """How deep containers are nested; `value` was weighed, so it has no cycle."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        if isinstance(item, Mapping):
            stack.extend((part, depth + 1) for part in item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend((part, depth + 1) for part in item)
    return deepest


def _raise_exception(message: str) -> None:
    raise RefusedError(f"{message!s:.300}")


def _strftime_now(format_string: str) -> str:
    if len(format_string) > 100 or any(char.isdigit() for char in format_string):
        raise LimitError("a time format that is long or has a width")
    return datetime.now().strftime(format_string)
