"""Statistics of a turn, as the lines under an answer."""

from typing import TYPE_CHECKING

from localllm.cli.draw.output import show_controls
from localllm.cli.draw.words import context, duration

if TYPE_CHECKING:  # `--help` needs no tokenizer
    from localllm.answer.completion import Completion, Truncation
    from localllm.chat.cache_report import CacheReport

# The cache keeps whole blocks, so a few tokens before a difference are computed again.
_BLOCK_TOKENS = 16


def describe_turn(completion: "Completion", context_length: int) -> str:
    """The line of statistics under an answer; only times if a server reports no token counts."""
    if not completion.num_prompt_tokens:
        took = (completion.last_token_s or completion.started_s) - completion.started_s
        return (
            f"first token {completion.ttft_s:.2f} s · whole answer {took:.2f} s"
            " · the server reports no token counts"
        )
    drafts = f" · drafts {describe_drafts(completion)}" if completion.num_drafted_tokens else ""
    computed = completion.num_prompt_tokens - completion.num_cached_tokens
    # For a few tokens, the rate would only reflect the time of a step.
    rate = f", {completion.prefill_tokens_per_s:,.0f} tok/s" if computed > _BLOCK_TOKENS else ""
    # The speed is unknown if a server sent the pieces of an answer together.
    decoded = completion.decode_tokens_per_s
    answer = f" · answer {decoded:,.0f} tok/s" if decoded or not completion.is_remote else ""
    return (
        f"prompt {completion.num_prompt_tokens:,} ({completion.num_cached_tokens:,} cached){rate}"
        f" · first token {completion.ttft_s:.2f} s"
        f"{answer}{drafts}"
        f" · {context(completion.num_context_tokens, context_length)}"
    )


def describe_drafts(completion: "Completion") -> str:
    """Accepted and drafted tokens, and whose they are."""
    by = [
        f"{each.drafter} {each.num_accepted:,}/{each.num_drafted:,}" for each in completion.drafts
    ]
    if len(by) == 1:
        return by[0]
    total = f"{completion.num_accepted_tokens:,}/{completion.num_drafted_tokens:,}"
    return f"{total} ({', '.join(by)})" if by else total


def describe_truncation(truncation: "Truncation") -> str:
    """What was left out of the prompt."""
    turns = f"{truncation.num_turns} turn{'s' * (truncation.num_turns > 1)}"
    return (
        f"dropped the oldest {turns} ({truncation.num_tokens:,} tokens) from the prompt "
        "(--overflow drop-oldest)"
    )


def describe_prompt(report: "CacheReport | None", completion: "Completion") -> list[str]:
    """As `describe_cache`; without a report, what the server says about its cache."""
    if report is not None:
        return describe_cache(report, completion)
    lines = ["only the server knows why"]
    if completion.num_prompt_tokens:
        computed = completion.num_prompt_tokens - completion.num_cached_tokens
        lines.insert(
            0,
            f"prompt of {completion.num_prompt_tokens:,} tokens: "
            f"{completion.num_cached_tokens:,} from the server's cache, {computed:,} computed",
        )
    return lines


def describe_cache(report: "CacheReport", completion: "Completion") -> list[str]:
    """Lines that say how much of a prompt came from the cache, and why the rest did not."""
    computed = report.num_prompt - report.num_cached
    took = f" in {duration(completion.ttft_s)}" if completion.ttft_s else ""
    lines = [
        f"prompt of {report.num_prompt:,} tokens: {report.num_cached:,} from the cache, "
        f"{computed:,} computed{took}"
    ]
    found = report.difference
    if report.num_earlier == 0:
        lines.append("  it is the first request to the model by this command")
    elif found is None and report.num_shared < report.num_earlier:
        known = f"{report.num_earlier:,} tokens"
        lines.append(f"  it is the beginning of the previous request, which had {known}")
    elif found is None:
        lines.append(f"  it continues all {report.num_earlier:,} tokens of the previous request")
    else:
        place = "in the template" if found.message is None else f"in message {found.message}"
        role = f" ({found.role})" if found.role else ""
        lines.append(
            f"  first difference from the previous request: token {found.token:,}, {place}{role}"
        )
        lines.append(show_controls(f"    before: {found.before!r}"))
        lines.append(show_controls(f"    now:    {found.now!r}"))
        if report.num_lost and completion.prefill_tokens_per_s:
            cost = duration(report.num_lost / completion.prefill_tokens_per_s)
            lines.append(f"  so {report.num_lost:,} tokens were computed again, about {cost}")
    gone = report.num_shared - report.num_cached
    if gone < 0:
        lines.append(f"  {_cached_by_others(report)}")
    if report.kind.keeps_states:
        lines += _describe_state(report, max(0, gone))
    elif gone > _BLOCK_TOKENS:
        lines.append(f"  {gone:,} tokens before that were no longer in the cache")
    return lines


def _cached_by_others(report: "CacheReport") -> str:
    """Where cached tokens come from that the previous request did not have."""
    count = report.num_cached - report.num_shared
    own = "requests before that one" if report.num_earlier else ""
    origin = ", or ".join(filter(None, (own, report.kind.elsewhere)))
    more = " more" if report.num_shared else ""
    return f"{count:,}{more} tokens came from {origin or 'earlier requests'}"


def _describe_state(report: "CacheReport", gone: int) -> list[str]:
    """Which state of a recurrent model the prompt went on from."""
    again = f"; {gone:,} shared tokens behind it were computed again" if gone else ""
    if report.num_cached:
        return [f"  it went on from the state kept at token {report.num_cached:,}{again}"]
    return [f"  no state was kept within the {gone:,} shared tokens"] if gone else []
