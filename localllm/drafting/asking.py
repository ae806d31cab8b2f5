"""What may be drafted for a request: how many tokens, and which of those that are proposed."""

from collections.abc import Sequence

from localllm.drafting.drafter import NOT_KNOWN, Drafter, Proposal
from localllm.schedule.request import Request

# The most drafted tokens of all requests in a step; the memory plan has room for their logits.
MAX_DRAFTED_TOKENS = 64


def room_of(request: Request, max_draft: int) -> int:
    """How many tokens may be drafted for a request now, `max_draft` at most."""
    is_decoding = request.num_tokens - request.num_computed_tokens == 1
    if request.num_pending or not is_decoding:
        return 0
    left = request.max_total_tokens - request.num_tokens - 1
    return max(0, min(max_draft, left))


def find_forced(running: Sequence[Request], max_draft: int) -> dict[Request, list[int]]:
    """For each request, the next tokens if its grammar allows no others."""
    found, left = dict[Request, list[int]](), MAX_DRAFTED_TOKENS
    for request in running:
        room = min(left, room_of(request, max_draft)) if request.matcher is not None else 0
        if request.matcher is not None and room:
            tokens = request.matcher.forced(room)
            left -= len(tokens)
            if tokens:
                found[request] = tokens
    return found


def ask(drafter: Drafter, request: Request, room: int) -> Proposal | None:
    """A drafter's proposal for a request, as far as the request's grammar allows it; all of it if
    its ids are not known yet.
    """
    proposal = drafter.propose(request, room)
    if proposal is None or request.matcher is None or NOT_KNOWN in proposal.token_ids:
        return proposal
    count = request.matcher.count_allowed(proposal.token_ids)
    return proposal._replace(token_ids=proposal.token_ids[:count]) if count else None
