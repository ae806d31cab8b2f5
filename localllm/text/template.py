"""Renders untrusted chat templates in a sandbox.

A template is a small program in Jinja. It runs in jinja2's immutable sandbox, which blocks access
to Python's internals, and under limits that the sandbox lacks (`template_sandbox.py`): a deadline,
checked at every line of Python, and bounds on what an operation in C may build.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError

from localllm.errors import TemplateError
from localllm.text.template_sandbox import LimitError, RefusedError, make_environment

RENDER_TIME_S = 1.5
MIN_MAX_CHARS = 1 << 20

_HINT = "report the template to the model's publisher, or use --raw to send the prompt as it is"


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The prompt text of a conversation, as the model was trained to read it.

    `variables` are the template's other variables (`bos_token`, `enable_thinking`, …).

    Raises: TemplateError for a syntax error, a refusal by the template itself
    (`raise_exception`), an escape attempt, or a template that exceeds its time or size.
    """
    given = {"messages": messages, "tools": tools, **variables}
    try:
        max_chars = MIN_MAX_CHARS + 4 * (len(template) + len(json.dumps(given, default=str)))
        environment = make_environment(max_chars)
        with _deadline(RENDER_TIME_S):
            compiled = environment.template_class.from_code(
                environment, _compile(template), environment.make_globals(None)
            )
            stream = compiled.generate(add_generation_prompt=add_generation_prompt, **given)
            return environment.join_pieces(stream)
    except RefusedError as error:
        raise TemplateError(
            f"the chat template refuses this conversation: {error}", hint="change the messages"
        ) from error
    except (LimitError, RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template was stopped: {error!s:.100}", hint=_HINT) from error
    except SecurityError as error:
        raise TemplateError(f"the chat template tried to escape: {error}", hint=_HINT) from error
    except JinjaError as error:
        line = getattr(error, "lineno", None)
        raise TemplateError(
            f"the chat template is broken: {error}",
            where=f"line {line} of the template" if line else "",
            hint=_HINT,
        ) from error
    except Exception as error:  # a template is an untrusted program: it can raise anything
        raise TemplateError(f"the chat template failed: {error!r:.200}", hint=_HINT) from error


# A process renders the templates of one or two models.
@lru_cache(maxsize=4)
def _compile(template: str) -> CodeType:
    """The template's code. Kept, since compiling it takes far longer than rendering with it."""
    return make_environment(MIN_MAX_CHARS + 4 * len(template)).compile(template)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise LimitError at the first line of Python that runs after `seconds` of this thread's
    processor time, which other programs on a busy machine do not use up. No template can sleep.

    A trace function needs no thread, signal or process, and a template's Python code calls it every
    few microseconds. Python removes a trace function that raises; LimitError is not an Exception,
    so nothing in jinja2 can swallow it and continue without the deadline.
    """
    end, own_end = time.monotonic() + seconds, time.thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        # The first clock is never behind the second, and takes a tenth of the time to read.
        if time.monotonic() > end and time.thread_time() > own_end:
            raise LimitError(f"it ran for more than {seconds:g} s")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)
