"""How tokens are drafted, and how many: validated like the rest of the configuration."""

from dataclasses import dataclass

from localllm.errors import RequestError

MAX_DRAFT = 63
MAX_NGRAM_MATCH = 64


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Configuration of speculation.

    `drafter`: "ngram" looks up the next tokens in earlier text, "head" asks the head that lies in
    the model's own files or its assistant beside them, "eagle:HEAD" one in a folder of its own,
    "draft:MODEL" a smaller model or an assistant; several are joined by "+". "auto" is "ngram", and
    "head" where there is one; "off" disables drafting. `max_draft`: the most drafted tokens per
    request and step; `min_match`, `max_match`: the least and the most tokens that are matched in
    earlier text.
    """

    drafter: str = "auto"
    max_draft: int = 15
    min_match: int = 2
    max_match: int = 8

    def __post_init__(self) -> None:
        names = self.drafter.split("+")
        kinds = [name.partition(":")[0] for name in names]
        is_known = self.drafter == "off" or all(map(_is_drafter, names))
        if not is_known or len(set(kinds)) < len(kinds):
            raise RequestError(
                "--spec must be off, or one or several of auto, ngram, head, eagle:HEAD and "
                f"draft:MODEL, joined by '+'; found {self.drafter!r:.60}",
                param="spec",
            )
        if self.eagle_head is not None and self.needs("head"):
            raise RequestError("--spec takes head or eagle:HEAD, not both", param="spec")
        if type(self.max_draft) is not int or not 1 <= self.max_draft <= MAX_DRAFT:
            raise RequestError(
                f"--spec-max must be a whole number from 1 to {MAX_DRAFT}, "
                f"found {self.max_draft!r:.40}",
                param="spec_max",
            )
        if not 1 <= self.min_match <= self.max_match <= MAX_NGRAM_MATCH:
            raise RequestError(
                f"--spec-ngram must be MIN:MAX within 1 and {MAX_NGRAM_MATCH}, "
                f"found {self.min_match}:{self.max_match}",
                param="spec_ngram",
            )

    @property
    def draft_model(self) -> str | None:
        """The name of the draft model; None if there is none."""
        return self._named("draft")

    @property
    def eagle_head(self) -> str | None:
        """The name of the EAGLE head; None if there is none."""
        return self._named("eagle")

    def _named(self, asked: str) -> str | None:
        found = (name.partition(":") for name in self.drafter.split("+"))
        return next((model for kind, _, model in found if kind == asked), None)

    def has(self, kind: str) -> bool:
        """Whether a drafter of that kind is asked for, "ngram" or "head"."""
        return not {kind, "auto"}.isdisjoint(self.drafter.split("+"))

    def needs(self, kind: str) -> bool:
        """Whether it is asked for by its own name."""
        return kind in self.drafter.split("+")


def _is_drafter(name: str) -> bool:
    kind, colon, model = name.partition(":")
    if kind in ("draft", "eagle"):
        return bool(model)
    return kind in ("auto", "ngram", "head") and not colon
