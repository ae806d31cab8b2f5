"""The load suite against a server with OpenAI's completions API, ours or another."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from localllm.attach.openai_chunks import Chunk
from localllm.attach.openai_client import Endpoint
from localllm.bench.load import LOADS, LoadRun, Timeline, load_row
from localllm.bench.results import ListedSuite
from localllm.bench.workload import LoadRequest, Mix
from localllm.errors import LocalLLMError, RequestError

MAX_AT_ONCE = 256
# A word of English is about a token; any other text would do.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school")


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, and which of its models answers."""

    endpoint: Endpoint
    model: str

    @classmethod
    def find(cls, url: str, model: str | None, api_key: str | None = None) -> "Server":
        """Use the named model, or else ask the server for its models and take the first.

        Raises: LocalLLMError if no such server answers.
        """
        endpoint = Endpoint.parse(url, api_key, "--url", "its key is read from OPENAI_API_KEY")
        if model is not None:
            return cls(endpoint, model)
        listed = endpoint.models()
        if not listed:
            raise RequestError(f"{endpoint.url} has no model")
        return cls(endpoint, next(iter(listed)))

    def complete(self, prompt: str, num_new: int) -> Iterator[Chunk]:
        """The chunks of a streamed completion. Raises: LocalLLMError."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,  # not in OpenAI's API, but common servers know it
        }
        with self.endpoint.request("/v1/completions", body) as reply:
            yield from reply.chunks()


class RemoteSuite(ListedSuite):
    """A full queue, then Poisson arrivals at shares of its throughput."""

    def __init__(self, server: Server, mix: Mix, at_once: int) -> None:
        self._server, self._mix, self._at_once = server, mix, at_once
        super().__init__()

    def run(self, progress: Callable[[str], None]) -> None:
        """Measure. Raises: RequestError if no request is answered."""
        progress("warming up")
        run_remote(self._server, self._mix.draw()[:2], 2)
        progress(f"{self._at_once} at once")
        requests = replace(self._mix, seed=self._mix.seed + 1).draw()
        full = run_remote(self._server, requests, self._at_once)
        conditions = {"requests": len(requests), "at_once": self._at_once}
        self._results.append(load_row(f"{self._at_once} at once", conditions, full))
        rate = len(requests) / full.seconds
        for i, load in enumerate(LOADS):
            progress(f"arrivals at {load:.0%} of that rate")
            requests = replace(self._mix, seed=self._mix.seed + 2 + i).draw(rate * load)
            run = run_remote(self._server, requests, MAX_AT_ONCE)
            rates = {"requests": len(requests), "requests_per_s": rate * load}
            self._results.append(load_row(f"load {load:.0%}", rates, run))


def run_remote(server: Server, requests: Sequence[LoadRequest], at_once: int) -> LoadRun:
    """Send each request when it arrives, at most `at_once` at a time.

    Raises: RequestError if none is answered, with the error of the first.
    """
    started = time.perf_counter()

    def answer(request: LoadRequest) -> Timeline | LocalLLMError:
        timeline = Timeline(request.arrival_s)
        time.sleep(max(0.0, started + request.arrival_s - time.perf_counter()))
        prompt = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt)
        try:
            for chunk in server.complete(prompt, request.num_new):
                if chunk.text:
                    timeline.token_s.append(time.perf_counter() - started)
                if chunk.usage is not None:
                    timeline.reported_tokens = chunk.usage.completion_tokens
        except LocalLLMError as error:
            return error
        return timeline

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(answer, requests))
    seconds = time.perf_counter() - started
    answered = [each for each in found if isinstance(each, Timeline) and each.token_s]
    if not answered:
        first = next((each for each in found if isinstance(each, LocalLLMError)), None)
        raise RequestError(
            f"{server.endpoint.url} answered none of {len(requests)} requests",
            where=f"POST /v1/completions: {first!s:.200}" if first else "the answers were empty",
            hint="one of its models by name: --url URL MODEL",
        )
    return LoadRun(answered, seconds, num_failed=len(found) - len(answered))
