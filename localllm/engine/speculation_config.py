"""How tokens are drafted, and how many: validated like the rest of the configuration."""

from dataclasses import dataclass

from localllm.errors import RequestError

MAX_DRAFT = 63
MAX_NGRAM_MATCH = 64


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Configuration of speculation.

    `drafter`: "auto" and "ngram" look up the next tokens in earlier text, "draft:MODEL" asks a
    smaller model, "off" disables drafting. `max_draft`: the most drafted tokens per request and
    step; `min_match`, `max_match`: the least and the most tokens that are matched in earlier text.
    """

    drafter: str = "auto"
    max_draft: int = 15
    min_match: int = 2
    max_match: int = 8

    def __post_init__(self) -> None:
        kind, colon, model = self.drafter.partition(":")
        if not ((kind == "draft" and model) or (kind in ("auto", "ngram", "off") and not colon)):
            raise RequestError(
                f"--spec must be auto, ngram, draft:MODEL or off, found {self.drafter!r:.60}",
                param="spec",
            )
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
        return self.drafter.partition(":")[2] or None
