"""llguidance's limits for a grammar, wherever it is compiled."""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """llguidance's own limits, some 20 ms for a grammar's expressions and 15 ms for a mask, except
    for one: an object with n optional names has 4 n items in a row.
    """
    return LLParserLimits(verbose_errors=False, max_items_in_row=10_000)
