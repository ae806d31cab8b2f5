"""Metrics for Prometheus, under vLLM's names with our prefix, so that its dashboards carry over.

Source: vLLM's documentation, "Production metrics".
"""

import time
from collections.abc import Iterable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localllm.answer.completion import TextEvent
from localllm.schedule.request import DraftCount
from localllm.server.engines import Engines

MetricT = TypeVar("MetricT", Gauge, Counter, Histogram)
_PREFIX = "localllm:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The metrics of one server since its start."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._running = self._new(Gauge, "num_requests_running", "Requests in the batch.")
        self._waiting = self._new(Gauge, "num_requests_waiting", "Requests waiting for blocks.")
        self._usage = self._new(
            Gauge, "kv_cache_usage_perc", "Share of the blocks in use; 1 is all."
        )
        self._preemptions = self._new(Gauge, "num_preemptions", "Requests that were preempted.")
        self._restarts = self._new(
            Gauge, "engine_restarts", "Engines that ended and were replaced."
        )
        self._of_replicas = self._new(
            Gauge,
            "replica_requests",
            "Requests of each replica, by whether they run or wait.",
            "replica",
            "state",
        )
        # Replicas that have answered: those that are gone are left out.
        self._named: set[str] = set()
        self._by_replica = self._new(
            Counter, "replica_answers", "Requests that each replica was given.", "replica"
        )
        self.prompt_tokens = self._new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._new(Counter, "generation_tokens", "Tokens of answers.")
        self.asked_tokens = self._new(Counter, "prefix_cache_queries", "Prompt tokens looked up.")
        self.cached_tokens = self._new(Counter, "prefix_cache_hits", "Prompt tokens found.")
        self.drafted_tokens = self._new(Counter, "spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted_tokens = self._new(
            Counter, "spec_decode_num_accepted_tokens", "Draft tokens accepted."
        )
        self._by_drafter = {
            kind: self._new(
                Counter,
                f"{kind}_by_drafter",
                f"Draft tokens of finished samples that were {kind.partition('_')[0]}, by drafter.",
                "drafter",
            )
            for kind in ("drafted_tokens", "accepted_tokens")
        }
        self.endings = self._new(
            Counter, "request_success", "Finished samples, by reason.", "finished_reason"
        )
        self.first_token_s = self._seconds("time_to_first_token_seconds", "Time to first token.")
        self.token_s = self._seconds("inter_token_latency_seconds", "Time between two tokens.")
        self.whole_s = self._seconds("e2e_request_latency_seconds", "Time to the end.")

    def answered(self, replica: str) -> None:
        """Count a request of one of several engines, however it ended."""
        if replica:
            self._named.add(replica)
            self._by_replica.labels(self._model, replica).inc()

    def ended(self, reason: str) -> None:
        """Count a finished sample."""
        self.endings.labels(self._model, reason).inc()

    def drafted(self, drafts: Iterable[DraftCount]) -> None:
        """Count the drafts of a finished sample."""
        for each in drafts:
            for kind, count in (
                ("drafted_tokens", each.num_drafted),
                ("accepted_tokens", each.num_accepted),
            ):
                self._by_drafter[kind].labels(self._model, each.drafter).inc(count)

    def text(self, engines: Engines) -> bytes:
        """All metrics, in Prometheus's text format."""
        stats = engines.stats
        self._of_replicas.clear()
        for name in self._named - set(engines.replicas):
            self._by_replica.remove(self._model, name)
        self._named &= set(engines.replicas)
        for name, each in engines.replicas.items():
            for kind, count in (("running", each.stats.running), ("waiting", each.stats.waiting)):
                self._of_replicas.labels(self._model, name, kind).set(count)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._usage.set(stats.used_blocks / max(1, stats.blocks))
        self._preemptions.set(stats.preemptions)
        self._restarts.set(engines.num_restarts)
        return generate_latest(self._registry)

    def _new(
        self, kind: type[MetricT], name: str, meaning: str, *labels: str, **more: Any
    ) -> MetricT:
        """A metric of this model; the user of one with further `labels` gives the model's too."""
        names = ("model_name", *labels)
        made = kind(f"{_PREFIX}{name}", meaning, names, registry=self._registry, **more)
        return made if labels else made.labels(self._model)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return self._new(Histogram, name, meaning, buckets=_SECONDS)


class Meter:
    """Measures one request of `num_choices` choices by its events."""

    def __init__(self, metrics: Metrics, num_prompt: int, num_choices: int) -> None:
        self._metrics, self._num_prompt = metrics, num_prompt
        self._began_s = time.monotonic()
        self._newest_s: list[float | None] = [None] * num_choices
        self._num_drafted = [0] * num_choices
        self._has_begun = False

    def add(self, index: int, event: TextEvent, num_cached: int) -> None:
        """Count an event of choice `index`; `num_cached`: cached tokens of all prompts so far."""
        metrics, now = self._metrics, time.monotonic()
        if event.token is not None:
            newest = self._newest_s[index]
            if newest is not None:
                metrics.token_s.observe(now - newest)
            elif not self._has_begun:
                self._has_begun = True
                metrics.first_token_s.observe(now - self._began_s)
                metrics.prompt_tokens.inc(self._num_prompt)
                metrics.asked_tokens.inc(self._num_prompt)
                metrics.cached_tokens.inc(num_cached)
            self._newest_s[index] = now
            metrics.generated_tokens.inc()
            metrics.accepted_tokens.inc(event.token.is_draft)
            metrics.drafted_tokens.inc(event.num_drafted_tokens - self._num_drafted[index])
            self._num_drafted[index] = event.num_drafted_tokens
        if event.finish_reason is not None:
            metrics.ended(str(event.finish_reason))
            metrics.drafted(event.drafts)

    def close(self) -> None:
        """Count the request's duration, however it ended."""
        self._metrics.whole_s.observe(time.monotonic() - self._began_s)
