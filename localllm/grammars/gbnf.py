"""Grammars in GBNF, llama.cpp's notation, rewritten in Lark's, which llguidance reads.

Source: llama.cpp, grammars/README.md; the translation is llguidance's own.
"""

import re

from localllm.errors import RequestError
from localllm.text.grammar import refused

# It is read recursively, in Python.
MAX_GBNF_BYTES = 64 << 10
_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


def is_gbnf(source: str) -> bool:
    """Whether a grammar is in GBNF: Lark's notation has no `::=`."""
    return _RULE.search(source) is not None


def lark_of_gbnf(source: str) -> str:
    """The same grammar in Lark's notation. Raises: RequestError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # rarely needed

    if len(source.encode(errors="replace")) > MAX_GBNF_BYTES:
        raise RequestError(
            f"a grammar in GBNF may have {MAX_GBNF_BYTES:,} bytes",
            param="grammar",
            hint="the same in Lark's notation, which may be longer",
        )
    try:
        return gbnf_to_lark(source)
    except GbnfToLarkError as error:
        raise refused("grammar", f"this is not GBNF: {error}") from error
    except RecursionError as error:
        raise refused("grammar", "its brackets are nested too deeply") from error
    except Exception as error:  # a rule that is missing, or defined twice
        raise refused("grammar", str(error)) from error
