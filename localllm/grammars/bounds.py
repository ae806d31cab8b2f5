"""Bounds on what a schema may ask for, so that nobody waits: multiples, and the shortest answer."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from localllm.grammars.lengths import check_length
from localllm.text.grammar import refused

# There is a state for each remainder, built before the first token: 10,000 take some 30 ms. Several
# multiples together have as many as their least common multiple.
MAX_MULTIPLE, MAX_ROUND_MULTIPLE = 10_000, 1_000_000
_MAX_DECIMALS = 9


def check_multiples(multiples: Sequence[Fraction]) -> None:
    """Check that `multipleOf` can be enforced with these multiples. Raises: RequestError."""
    if not multiples:
        return
    for each in multiples:
        if each * 10**_MAX_DECIMALS % 1:
            raise refused(
                "JSON schema", f"multipleOf has more than {_MAX_DECIMALS} decimals: {float(each)}"
            )
    # As whole numbers, in units of their last decimal place.
    decimals = next(
        n for n in range(_MAX_DECIMALS + 1) if all(m * 10**n % 1 == 0 for m in multiples)
    )
    common = lcm(*(int(each * 10**decimals) for each in multiples))
    is_round = len(str(common).rstrip("0")) == 1
    if common > (MAX_ROUND_MULTIPLE if is_round else MAX_MULTIPLE):
        shown = ", ".join(sorted({f"{float(each):.12g}" for each in multiples}))
        raise refused(
            "JSON schema",
            f"multipleOf is too large ({shown:.100}): the least common multiple may be at most "
            f"{MAX_MULTIPLE:,}, or one digit and zeros up to {MAX_ROUND_MULTIPLE:,}",
        )


def check_shortest(schema: Any) -> None:
    """Check that the shortest valid answer is not too long. Raises: RequestError."""
    check_length(_Shortest(schema.get("$defs", {})).of(schema), "JSON schema")


class _Shortest:
    """Lower bounds on the bytes of valid JSON."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[str, int] = {}

    def of(self, schema: Any) -> int:
        """A lower bound on the bytes of JSON that is valid under `schema`."""
        if not isinstance(schema, dict):
            return 1
        found: list[int] = [1, self._of_kinds(schema)]
        found += [self.of(each) for each in schema.get("allOf", [])]
        if "anyOf" in schema:
            found.append(min(map(self.of, schema["anyOf"]), default=1))
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._known:
                self._known[name] = 1  # for references to itself
                self._known[name] = self.of(self._definitions[name])
            found.append(self._known[name])
        return max(found)

    def _of_kinds(self, schema: Mapping[str, Any]) -> int:
        kinds = schema.get("type", ["null"])
        if isinstance(kinds, list):
            kinds = kinds[0] if len(kinds) == 1 else "null"
        match kinds:
            case "string":
                return int(schema.get("minLength", 0)) + 2
            case "array":
                least: int = schema.get("minItems", 0)
                first = schema.get("prefixItems", [])
                more = max(0, least - len(first))
                item = self.of(schema.get("items", True)) if more else 0
                return 2 + sum(map(self.of, first[:least])) + more * item
            case "object":
                properties = schema.get("properties", {})
                return 2 + sum(
                    len(name) + self.of(properties.get(name, True))
                    for name in schema.get("required", [])
                )
            case _:
                return 1
