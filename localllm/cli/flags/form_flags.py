"""The flags that constrain an answer: to JSON, a schema, a regular expression or a grammar."""

import json
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.flags.groups import Flags, setting
from localllm.cli.input.user_input import read_file
from localllm.errors import RequestError
from localllm.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class FormFlags(Flags):
    """The format that the answer must have, set by one of four flags."""

    section = "Answer format"
    exclusive = (("format_", "json_schema", "regex", "grammar"),)

    format_: str | None = setting(
        None, "--format", help="The answer is a JSON object.", choices=("json",)
    )
    json_schema: str | None = setting(
        help="The answer is JSON that matches the schema in FILE.", metavar="FILE"
    )
    regex: str | None = setting(help="The answer matches a regular expression.", metavar="RE")
    grammar: Path | None = setting(help="The answer follows the Lark grammar in FILE.")

    def read(self) -> Grammar | None:
        """The grammar of the answer; None if no flag is given. Raises: RequestError."""
        self._check_one()
        found = self._find()
        if found is not None:
            from localllm.answer.grammar_compiler import check_grammar

            check_grammar(found)
        return found

    def _check_one(self) -> None:
        flags = {
            "format": self.format_,
            "json-schema": self.json_schema,
            "regex": self.regex,
            "grammar": self.grammar,
        }
        given = [name for name, value in flags.items() if value is not None]
        if len(given) > 1:
            raise RequestError(f"--{given[0]} and --{given[1]} cannot be combined", param=given[1])
        if self.format_ not in (None, "json"):
            raise RequestError(
                f"--format must be json, found {self.format_!r:.40}",
                param="format",
                hint="--json-schema, --regex or --grammar for other formats",
            )

    def _find(self) -> Grammar | None:
        if self.json_schema is not None:
            return _read_schema(self.json_schema)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return Grammar("lark", read_file(self.grammar))
        return None if self.format_ is None else Grammar.any_object()


def _read_schema(given: str) -> Grammar:
    """Read the schema from the file `given`, or from `given` itself if it begins with `{`."""
    is_text = given.lstrip().startswith("{")
    text = given if is_text else read_file(Path(given))
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the JSON schema is not valid JSON: {error!s:.200}",
            param="json-schema",
            where="--json-schema" if is_text else given,
            hint='a file with a JSON schema, or the schema itself, such as {"type": "object"}',
        ) from error
    return Grammar.of_schema(schema, "json-schema")
