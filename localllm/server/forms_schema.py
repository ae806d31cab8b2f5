"""The fields that ask for the form of an answer, of OpenAI's API and of those that follow it.

A field that would change the form is honoured or refused, never ignored. Sources: OpenAI's API
reference (`response_format`); vLLM (`structured_outputs`, and `guided_…` before it); the servers of
llama.cpp (`grammar`, `json_schema`, a schema beside `json_object`), Ollama (`format`), SGLang
(`regex`, `ebnf`), Fireworks (`grammar` as a type of response_format) and Together (`regex` as one).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from localllm.grammars.gbnf import is_gbnf, lark_of_gbnf
from localllm.server.body import Body, Name, WholeBody, never
from localllm.server.limits import LIMITS
from localllm.text.grammar import Grammar, lark_literal

Source = Annotated[str, Field(min_length=1, max_length=LIMITS.grammar_bytes)]
Schema = dict[str, Any] | bool


def _read_if_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be a JSON schema") from error


# A schema, or JSON in which one is written.
WrittenSchema = Annotated[Schema, BeforeValidator(_read_if_text)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=LIMITS.choices, fail_fast=True),
]


def grammar_of(source: str) -> Grammar:
    """A grammar in Lark's notation or in GBNF. Raises: RequestError."""
    return Grammar("lark", lark_of_gbnf(source) if is_gbnf(source) else source)


def any_of(choices: list[str]) -> Grammar:
    """One of some texts."""
    return Grammar("lark", "start: " + " | ".join(map(lark_literal, choices)))


class StructuredOutputs(Body):
    """The format of an answer, under vLLM's names: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: WrittenSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Source | None = None
    grammar: Source | None = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        given = (self.json_, self.json_object or None, self.regex, self.grammar, self.choice)
        if sum(each is not None for each in given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, grammar, choice")
        return self

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        if self.json_ is not None:
            return Grammar.of_schema(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return grammar_of(self.grammar)
        if self.choice is not None:
            return any_of(self.choice)
        return Grammar.any_object()


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]

    def form(self) -> Grammar | None:
        """None: any text."""
        return None


class JsonObjectFormat(Body):
    """Any JSON object, or one that matches a schema."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(None, alias="schema")

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        if self.schema_ is None or self.schema_ is True:
            return Grammar.any_object()
        return Grammar.of_schema(self.schema_)


class JsonSchema(Body):
    """A schema with its name; it is enforced with or without `strict`."""

    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _may_be_flat(cls, value: Any) -> Any:
        """As the Responses API and llama.cpp's server have it."""
        if not isinstance(value, dict) or "schema" not in value or "json_schema" in value:
            return value
        own = {"type": value.get("type")}
        return {**own, "json_schema": {k: v for k, v in value.items() if k != "type"}}

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        return Grammar.of_schema(self.json_schema.schema_)


class RegexFormat(Body):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    pattern: Source

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        return Grammar("regex", self.pattern)


class GrammarFormat(Body):
    """Text of a grammar."""

    type: Literal["grammar"]
    grammar: Source

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        return grammar_of(self.grammar)


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat,
    Field(discriminator="type"),
]
_SCHEMAS, _GRAMMARS = ("guided_json", "json_schema"), ("guided_grammar", "grammar", "ebnf")
_PATTERNS = ("guided_regex", "regex")


# Forms that cannot be followed.
Unfollowed = Annotated[None, never("not supported; use response_format or structured_outputs")]


class Forms(WholeBody):
    """The fields; at most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: WrittenSchema | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    json_schema: WrittenSchema | None = None
    grammar: Source | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    format: Literal["json"] | Schema | None = None

    structural_tag: Unfollowed = None
    guided_whitespace_pattern: Unfollowed = None

    @field_validator("grammar", "regex", "ebnf", "format", mode="before")
    @classmethod
    def _may_be_empty(cls, value: object) -> object:
        return value or None

    @model_validator(mode="after")
    def _at_most_one(self) -> "Forms":
        if len(self._given_forms) > 1:
            raise ValueError(f"{' and '.join(self._given_forms[:2])} cannot be combined")
        return self

    @property
    def _given_forms(self) -> list[str]:
        return [name for name in Forms.model_fields if getattr(self, name) is not None]

    @property
    def grammar_field(self) -> str:
        """See Asks."""
        return next(iter(self._given_forms), "response_format")

    def form(self) -> Grammar | None:
        """The form that is asked for; None: any text. Raises: RequestError."""
        name = next(iter(self._given_forms), None)
        value: Any = None if name is None else getattr(self, name)
        if name in _SCHEMAS:
            return Grammar.of_schema(value)
        if name in _GRAMMARS:
            return grammar_of(value)
        if name in _PATTERNS:
            return Grammar("regex", value)
        if name == "guided_choice":
            return any_of(value)
        if name == "format":
            return Grammar.any_object() if value == "json" else Grammar.of_schema(value)
        found: Grammar | None = None if value is None else value.form()
        return found
