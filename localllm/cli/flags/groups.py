"""Flags as dataclass fields: each is defined once, and a command takes whole groups of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, TypeVar

import typer

Returned = TypeVar("Returned")
_CONTEXT = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)


class Flags:
    """A group of flags: the base class of frozen dataclasses whose fields are made by `flag` or
    `setting`, or are other groups.

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


def flag(
    default: Any = None,
    *names: str,
    help: str,
    metavar: str | None = None,
    suggest: Callable[[str], list[str]] | None = None,
    choices: Sequence[str] = (),
    section: str | None = None,
    can_be_set: bool = False,
) -> Any:
    """A field of a group. Its flag is called `--name` after it, unless `names` have a long name.

    `choices`: the words that it accepts, which are shown and completed; `suggest` completes others.
    `section`: its section in a long `--help`, if not its group's. `can_be_set`: see `setting`.
    """
    info = typer.Option(
        ...,  # the default is the field's
        *names,
        help=help,
        show_envvar=False,
        metavar="|".join(choices) or metavar,
        autocompletion=one_of(*choices) if choices else suggest,
        rich_help_panel=section,
    )
    return field(default=default, metadata={"option": info, "can_be_set": can_be_set})


def setting(default: Any = None, *names: str, **described: Any) -> Any:
    """As `flag`, but the variable LOCALLLM_NAME, or a setting, can give its value too."""
    return flag(default, *names, can_be_set=True, **described)


def option(*names: str, help: str) -> Any:
    """A flag of one command, outside of a group, that a variable or a setting can also give."""
    return typer.Option(*names, help=help, envvar=_variable(names), show_envvar=False)


def _variable(names: Sequence[str]) -> str:
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    return "LOCALLLM_" + long.removeprefix("--").replace("-", "_").upper()


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
        known = {each.name: each for each in fields(self.kind)}  # type: ignore[arg-type]
        return [known[name] for name in self.names or known]

    def parameters(self) -> Iterator[Parameter]:
        for each in self.fields():
            group = _group(each.type)
            if group is None:
                yield _parameter(each, self.kind.section)
            else:
                yield from group.parameters()

    def exclusive(self) -> Iterator[tuple[str, ...]]:
        yield from self.kind.exclusive
        for group in (_group(each.type) for each in self.fields()):
            if group is not None:
                yield from group.exclusive()

    def filled(self, values: dict[str, Any]) -> Flags:
        groups = {each.name: _group(each.type) for each in self.fields()}
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


def _parameter(given: "Field[Any]", section: str) -> Parameter:
    info = copy(given.metadata["option"])
    if not any(name.startswith("--") for name in info.param_decls):
        info.param_decls = (*info.param_decls, "--" + given.name.replace("_", "-"))
    info.envvar = _variable(info.param_decls) if given.metadata["can_be_set"] else None
    info.rich_help_panel = info.rich_help_panel or section or None
    kind: Any = given.type
    return Parameter(
        given.name,
        Parameter.KEYWORD_ONLY,
        default=given.default,
        annotation=Annotated[kind, info],
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
