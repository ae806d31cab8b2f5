"""What llguidance may take for a grammar, wherever it is compiled."""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Its own limits, some 20 ms for a grammar's expressions and 15 ms for a mask, but for one: an
    object of n names that may be left out has 4 n items in a row.
    """
    return LLParserLimits(verbose_errors=False, max_items_in_row=10_000)
