"""Flags as dataclass fields: each is defined once, and a command takes whole groups of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, TypeVar

import typer

Returned = TypeVar("Returned")
_CONTEXT = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)


class Flags:
    """A group of flags: the base class of frozen dataclasses whose fields are typer options,
    typer arguments, or other groups.

    `section` is its heading in a long `--help`; without one its flags come last. Each row of
    `exclusive` names fields of which at most one may be given.
    """

    __slots__ = ()
    section: ClassVar[str] = ""
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()


@dataclass(frozen=True, slots=True)
class Only:
    """Which fields of a group a command takes, in the order of its help."""

    names: tuple[str, ...]


def only(*names: str) -> Only:
    """For a parameter's `Annotated`: the command takes these fields of the group as flags; the
    others keep their defaults.
    """
    return Only(names)


def one_of(*words: str) -> Callable[[str], list[str]]:
    """A completion for a flag that takes one of `words`."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def option(
    *names: str,
    help: str,
    metavar: str | None = None,
    suggest: Callable[[str], list[str]] | None = None,
    choices: Sequence[str] = (),
    section: str | None = None,
) -> Any:
    """A flag that the variable LOCALLLM_NAME can also set; `suggest` completes its value.

    `choices`: the words that it accepts, which are shown and completed. `section`: its section in
    a long `--help`, if not that of its group.
    """
    variable = next(name for name in names if name.startswith("--")).partition("/")[0]
    envvar = "LOCALLLM_" + variable.removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        *names,
        help=help,
        envvar=envvar,
        show_envvar=False,
        metavar="|".join(choices) or metavar,
        autocompletion=one_of(*choices) if choices else suggest,
        rich_help_panel=section,
    )


def takes_flags(command: Callable[..., Returned]) -> Callable[..., Returned]:
    """Wrap `command` for typer: the fields of its groups become its parameters, and it is called
    with the filled groups.

    A typed flag overrides variables and settings of the flags that it excludes. Raises: TypeError
    if two groups have a field of the same name.
    """
    own = signature(command).parameters
    groups = {name: _group(each.annotation) for name, each in own.items()}
    taken = _by_name(_flattened(own.values()))

    @wraps(command)
    def call(context: typer.Context, **values: Any) -> Returned:
        given = {**values, "context": context}
        for group in filter(None, groups.values()):
            for names in group.exclusive():
                _prefer_what_was_typed(context, [taken[n] for n in names if n in taken], given)
        return command(
            **{name: given[name] if g is None else g.filled(given) for name, g in groups.items()}
        )

    described = {"context": _CONTEXT} | taken
    vars(call)["__signature__"] = Signature(list(described.values()))
    call.__annotations__ = {name: each.annotation for name, each in described.items()}
    return call


@dataclass(frozen=True, slots=True)
class _Group:
    """A class of flags, and which of its fields a command takes."""

    kind: type[Flags]
    names: tuple[str, ...]

    def fields(self) -> "list[Field[Any]]":
        known = {field.name: field for field in fields(self.kind)}  # type: ignore[arg-type]
        return [known[name] for name in self.names or known]

    def parameters(self) -> Iterator[Parameter]:
        for field in self.fields():
            group = _group(field.type)
            if group is None:
                yield _parameter(field, self.kind.section)
            else:
                yield from group.parameters()

    def exclusive(self) -> Iterator[tuple[str, ...]]:
        yield from self.kind.exclusive
        for field in self.fields():
            group = _group(field.type)
            if group is not None:
                yield from group.exclusive()

    def filled(self, values: dict[str, Any]) -> Flags:
        groups = {field.name: _group(field.type) for field in self.fields()}
        return self.kind(
            **{n: values[n] if g is None else g.filled(values) for n, g in groups.items()}
        )


def _group(annotation: Any) -> _Group | None:
    """The group that an annotation of a parameter or field names; None for a single flag."""
    kind = getattr(annotation, "__origin__", annotation)
    if not (isinstance(kind, type) and issubclass(kind, Flags)):
        return None
    chosen = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Only)]
    return _Group(kind, chosen[0].names if chosen else ())


def _parameter(field: "Field[Any]", section: str) -> Parameter:
    annotation: Any = field.type
    [info] = annotation.__metadata__
    info = copy(info)
    info.rich_help_panel = info.rich_help_panel or section or None
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(
        field.name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation.__origin__, info],
    )


def _flattened(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    for parameter in parameters:
        group = _group(parameter.annotation)
        if group is not None:
            yield from group.parameters()
        elif parameter.annotation is not typer.Context:
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)


def _by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for parameter in parameters:
        if parameter.name in found:
            raise TypeError(f"two groups of flags have a field named {parameter.name}")
        found[parameter.name] = parameter
    return found


def _prefer_what_was_typed(
    context: typer.Context, parameters: Sequence[Parameter], values: dict[str, Any]
) -> None:
    sources = {each.name: context.get_parameter_source(each.name) for each in parameters}
    kinds = {name: source.name for name, source in sources.items() if source is not None}
    if "COMMANDLINE" not in kinds.values():
        return
    for each in parameters:
        if kinds.get(each.name) in ("ENVIRONMENT", "DEFAULT_MAP"):
            values[each.name] = each.default
