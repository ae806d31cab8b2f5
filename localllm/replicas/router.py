"""The request router of replicas: Ray Serve asks it, and it asks Affinity.

One lives beside each front, in the loop that Ray routes in. Source: the interface of Ray Serve 2.60
for request routers of one's own.
"""

from collections.abc import Sequence

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from localllm.replicas.affinity import Affinity
from localllm.replicas.ask import Ask


class PrefixRouter(RequestRouter):
    """Sends a request where its prompt is cached, unless another replica would be done sooner.

    Requests for a model go only to replicas of that model: while one is replaced by another, both
    run.
    """

    def initialize_state(self) -> None:
        """See RequestRouter."""
        self._affinity = Affinity()

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See RequestRouter: each replica is a rank of its own."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        ask = None if pending_request is None else _ask_of(pending_request)
        if pending_request is None or ask is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        self._affinity.keep(by_name)
        reported = {
            name: int(each.routing_stats.get("requests", 0)) for name, each in by_name.items()
        }
        ranked = [
            name
            for name in self._affinity.rank(ask.keys, ask.num_tokens, reported)
            if by_name[name].replica_metadata.get("model") == ask.model
        ]
        # Those that failed this request come last: there may be no others.
        ranked.sort(key=ask.avoid.__contains__)
        if ranked:
            # At once, so that requests that come together see each other.
            self._give(pending_request, ranked[0], ask)
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """See RequestRouter."""
        ask = _ask_of(pending_request)
        if ask is not None:
            self._give(pending_request, replica_id.unique_id, ask)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See RequestRouter."""
        self._affinity.ended(internal_request_id)

    def _give(self, request: PendingRequest, replica: str, ask: Ask) -> None:
        name = request.metadata.internal_request_id
        self._affinity.give(name, replica, ask.keys, ask.num_tokens)
        request.future.add_done_callback(
            lambda future: self._affinity.ended(name) if future.cancelled() else None
        )


def _ask_of(request: PendingRequest) -> Ask | None:
    """What is asked; None for calls of other methods."""
    first = request.args[0] if request.args else None
    return first if isinstance(first, Ask) else None
