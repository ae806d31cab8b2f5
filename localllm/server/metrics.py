"""Metrics for Prometheus, under vLLM's names with our prefix, so that its dashboards carry over.

Source: vLLM's documentation, "Production metrics".
"""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localllm.answer.completion import TextEvent
from localllm.schedule.request import DraftCount
from localllm.server.engines import Engines

_PREFIX = "localllm:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The metrics of one server since its start."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting for blocks.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the blocks in use; 1 is all.")
        self._preemptions = self._gauge("num_preemptions", "Requests that were preempted.")
        self._restarts = self._gauge("engine_restarts", "Engines that ended and were replaced.")
        self._of_replicas = Gauge(
            f"{_PREFIX}replica_requests",
            "Requests of each replica, by whether they run or wait.",
            ("model_name", "replica", "state"),
            registry=self._registry,
        )
        # Replicas that have answered: those that are gone are left out.
        self._named: set[str] = set()
        self._by_replica = Counter(
            f"{_PREFIX}replica_answers",
            "Requests that each replica was given.",
            ("model_name", "replica"),
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self.asked_tokens = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self.drafted_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted."
        )
        self._by_drafter = {
            kind: Counter(
                f"{_PREFIX}{kind}_by_drafter",
                f"Draft tokens of finished samples that were {kind.partition('_')[0]}, by drafter.",
                ("model_name", "drafter"),
                registry=self._registry,
            )
            for kind in ("drafted_tokens", "accepted_tokens")
        }
        self.endings = Counter(
            f"{_PREFIX}request_success",
            "Finished samples, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Time to first token.")
        self.token_s = self._histogram("inter_token_latency_seconds", "Time between two tokens.")
        self.whole_s = self._histogram("e2e_request_latency_seconds", "Time to the end.")

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

    def _gauge(self, name: str, meaning: str) -> Gauge:
        made = Gauge(f"{_PREFIX}{name}", meaning, ("model_name",), registry=self._registry)
        return made.labels(self._model)

    def _counter(self, name: str, meaning: str) -> Counter:
        made = Counter(f"{_PREFIX}{name}", meaning, ("model_name",), registry=self._registry)
        return made.labels(self._model)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        made = Histogram(
            f"{_PREFIX}{name}",
            meaning,
            ("model_name",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        return made.labels(self._model)


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
