"""Drafts from a smaller model with the same vocabulary, over entries of its own."""

from collections.abc import Sequence

from localllm.drafting.follower import CHUNK, Followed, Follower
from localllm.drafting.own_entries import OwnEntries
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner


class DraftModel(Follower):
    """Drafts with a runner of the smaller model; `kv_cache` has the target cache's block ids.

    It follows every request, and its entries serve each text that begins alike.
    """

    _entries: OwnEntries

    def __init__(
        self,
        runner: HeadRunner,
        kv_cache: PagedKVCache,
        max_model_len: int,
        max_tokens: int,
        table: int = 0,
    ) -> None:
        """`max_model_len`: the draft model's positions; `max_tokens`: the most tokens in one of its
        steps; `table`: the index of the request's table that it uses, that of a full group.
        """
        super().__init__(runner, max_model_len, max_tokens, CHUNK, OwnEntries(kv_cache, table))

    @property
    def has_work(self) -> bool:
        return True

    def _is_behind(self, request: Request) -> bool:
        known, followed = request.num_computed_tokens, self._known(request)
        lacking = known - (followed.num_known if followed else 0)
        return self._longest_lag < lacking and known <= self._max_model_len

    def _follow(self, request: Request) -> Followed:
        if self._known(request) is None:
            self._followed[request] = Followed.begin(request)
        followed = super()._follow(request)
        assert followed is not None
        end = min(len(request.token_ids) - 1, self._entries.num_slots(request))
        differing = self._entries.differing(followed.text, followed.num_known, end)
        followed.num_known = int(differing[0]) if len(differing) else end
        if self._entries.has_states:
            # Entries of others serve it too, but their states do not.
            followed.num_known = min(followed.num_known, followed.reached)
            if followed.num_known < followed.stands:  # a state cannot go back
                followed.num_known = followed.stands = followed.reached = 0
        return followed

    def _book_draft(self, followed: Followed, draft: Sequence[int]) -> None:
        self._entries.write(followed.text, followed.num_known, draft[:-1])
        followed.reached = followed.num_known + len(draft) - 1
