"""Token ids in, token events out: the step loop over scheduler, runner and sampler."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.drafting.speculator import Speculator, StepOutcome
from localllm.engine.engine_state import EngineState, InFlight, Lost, Settled, Unsettled
from localllm.engine.pooler import Pooler
from localllm.engine.prefix_disk import PrefixDisk
from localllm.engine.prompt_scorer import PromptScorer
from localllm.engine.sampler import sample_seed
from localllm.errors import DeviceError, RequestError
from localllm.operators.device import is_fatal, is_out_of_memory
from localllm.schedule.grammar_turns import GrammarTurns
from localllm.schedule.logprobs import PromptScores
from localllm.schedule.matcher import Matcher
from localllm.schedule.pacing import Pacer
from localllm.schedule.prompt_progress import PromptProgress
from localllm.schedule.request import DraftCount, FinishReason, Request, RequestStatus, TokenEvent
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.runner import Runner
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch, Scheduler
from localllm.schedule.snapshots import spread
from localllm.text.context import Context

if TYPE_CHECKING:
    from torch import Tensor


class Engine:
    """Runs any number of requests at once; the caller drives it with `step`.

    If the runner overlaps, a step schedules and starts a batch while the previous one is being
    computed, and returns the previous one's tokens. Not thread-safe: call it from one thread.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: EngineLimits,
        speculator: Speculator | None = None,
        prefix_disk: PrefixDisk | None = None,
        pacer: Pacer | None = None,
        pooler: Pooler | None = None,
        scorer: PromptScorer | None = None,
        prompt_work: Callable[[int], float] = float,
    ) -> None:
        """`prefix_disk`: the scheduler's store, written to while there are no requests. `pacer`:
        limits how much prefill may delay running answers; None: prefill may fill whole steps.
        `pooler`: its tap is the runner's last one; None: requests cannot ask for `pooling`.
        `scorer`: None: nor for `prompt_logprobs`. `prompt_work`: the work of so many tokens at a
        prompt's start, in any unit.
        """
        self._prompt_work = prompt_work
        self._pooler, self._scorer = pooler, scorer
        self.limits = limits
        self.scheduler = scheduler
        self._runner = runner
        self.speculator = speculator
        self._prefix_disk = prefix_disk
        self._pacer = pacer
        self._grammar_turns = GrammarTurns()
        # When the last batch was collected, and the seconds that learning from it took since.
        self._collected_s = self._learned_s = 0.0
        self._next_request_id = 0
        self._state: EngineState = Settled()

    def beside(
        self,
        *,
        scheduler: Scheduler | None = None,
        speculator: Speculator | None = None,
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
        pacer: Pacer | None = None,
    ) -> "Engine":
        """Another engine on the same model and cache, to be compared with this one.

        Only one of the two may have requests at a time; both may where steps do not overlap and
        the model keeps no states, if `salt`s keep their prompts apart and each has a scheduler of
        its own. `scheduler` must use this engine's pools; None: this engine's scheduler.
        """
        chosen = scheduler or self.scheduler
        runner, scorer = wrap(self._runner), self._scorer
        return Engine(
            runner,
            chosen,
            self.limits,
            speculator,
            pacer=pacer,
            scorer=scorer,
            prompt_work=self._prompt_work,
        )

    @property
    def context_length(self) -> int:
        """The most tokens that a request may have, prompt and answer together."""
        return min(self.limits.max_model_len, self.scheduler.max_request_tokens)

    @property
    def context(self) -> Context:
        """How much a request reads and writes, and how to get more."""
        longer = self.limits.way_to_longer_context(self.scheduler.max_request_tokens)
        return Context(self.context_length, longer, self.scheduler.keeps_states)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        matcher: Matcher | None = None,
        borders: Collection[int] = (),
        num_to_keep: int = 0,
    ) -> int:
        """Queue a request of `params.n` samples; returns its id, which its events carry.

        The answer is limited to the room left in the context. Requests with different `salt`s share
        neither cached blocks nor drafts, so timing reveals nothing about another's text. `matcher`
        must be at the start of the answer; the first sample takes it over. `borders`: where
        messages of the prompt end, from which a later prompt may go on in another way.
        `num_to_keep`: tokens of the prompt that the cache should keep for longer than others.

        Raises: RequestError for token ids out of range; ContextLengthError for a prompt that
        leaves no room for a new token. Other requests are not affected. DeviceError: see `step`.
        """
        self._check_alive()
        if params.pooling is not None and self._pooler is None:
            raise RequestError(
                "this engine makes no embeddings", param="input", hint="serve --embeddings"
            )
        self.limits.check(prompt_token_ids, params, self.scheduler.max_request_tokens)
        num_prompt = len(prompt_token_ids)
        room = self.context_length - num_prompt
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.pooling is not None:
            max_tokens = 1
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        scores = None
        if params.prompt_logprobs is not None:
            assert self._scorer is not None
            num_top = min(params.prompt_logprobs, self.limits.vocab_size)
            scores = PromptScores.of(num_prompt, num_top)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request_id = self._next_request_id
        self._next_request_id += 1
        if matcher is not None and not _may_call(params):
            matcher.limit(max_tokens)
        first: Request | None = None
        for sample in range(params.n):
            request = Request(
                request_id=request_id,
                sample=sample,
                num_prompt_tokens=num_prompt,
                token_ids=list(prompt_token_ids),
                params=params,
                seed=sample_seed(seed, sample),
                stop_token_ids=stop_ids,
                max_total_tokens=num_prompt + max_tokens,
                parent=first,
                salt=salt,
                # The same prompt again computes its newest token, and the block in which that lies.
                borders=spread({*borders, num_prompt - 1}),
                num_to_keep=min(num_to_keep, num_prompt),
                matcher=matcher if sample == 0 or matcher is None else matcher.copy(),
                scores=scores if sample == 0 else None,
                needs_ids=matcher is not None or self._runner.needs_ids(params),
            )
            first = first or request
            self.scheduler.add(request)
        return request_id

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        """How far the prompt of a request is; None once it has ended. May be called from another
        thread.
        """
        for request in self.scheduler.unfinished():
            if request.request_id == request_id:
                num_prompt = request.num_prompt_tokens
                computed = min(request.num_computed_tokens, num_prompt)
                work = self._prompt_work(computed) / self._prompt_work(num_prompt)
                return PromptProgress(computed, num_prompt, work)
        return None

    def has_unfinished(self) -> bool:
        """Whether `step` has work to do, or events to return."""
        has_events = isinstance(self._state, Unsettled) and bool(self._state.events)
        return self.scheduler.has_unfinished() or has_events

    def step(self) -> list[TokenEvent]:
        """Start the next batch, and return the events of the batch that is due.

        If memory runs out in a batch, its largest request starts again in smaller steps; if that is
        not enough either, this request alone ends with an error.

        Raises: DeviceError if the device is lost, and from then on at every call.
        """
        match self._state:
            case Lost(error):
                raise error
            case Unsettled(in_flight, events):
                self._state = Unsettled(None, events)  # not lost if this fails too
                booked = self._collect(in_flight)
                self._state = Settled()
                return [*events, *booked]
            case Settled(in_flight):
                return self._advance(in_flight)

    def work_ahead(self) -> bool:
        """Do a small piece of work that makes later steps faster, unless there are requests; False
        if nothing is left to do.
        """
        if self.has_unfinished():
            return False
        self._settle()  # a batch in flight has only requests that have ended
        if self._prefix_disk is not None and self._prefix_disk.save_next():
            return True
        drafts = self.speculator
        try:
            # The drafter is warmed up before any tuning, which takes minutes.
            if drafts is not None and self._runner.is_warm and not drafts.is_warm:
                return drafts.work_ahead()
            return self._runner.work_ahead() or (drafts is not None and drafts.work_ahead())
        except Exception as error:
            self._note_if_fatal(error)
            raise

    @property
    def is_warm(self) -> bool:
        """Whether `work_ahead` has made all kernels and graphs, so no request waits for them."""
        return self._runner.is_warm and (self.speculator is None or self.speculator.is_warm)

    def finish(self) -> None:
        """End all requests, and save the prefixes that are waiting for the disk."""
        for request in self.scheduler.unfinished():
            self.abort(request.request_id, request.sample)
        self._settle()
        while self._prefix_disk is not None and self._prefix_disk.save_next():
            pass

    def abort(self, request_id: int, sample: int | None = None) -> list[TokenEvent]:
        """End a request, or one sample of it, now; its blocks are freed at once.

        Returns the final events of the samples that were not finished.
        """
        ended = self.scheduler.abort(request_id, sample)
        return [
            TokenEvent(
                request_id,
                request.sample,
                None,
                FinishReason.ABORT,
                drafts=self._last_drafts(request),
            )
            for request in ended
        ]

    def _advance(self, in_flight: InFlight | None) -> list[TokenEvent]:
        """Start the next batch while another may be in flight, and collect the one that is due."""
        began_s = time.perf_counter() - self._learned_s  # learning is part of what drafts cost
        self._learned_s = 0.0
        events: list[TokenEvent] = []
        # The allowed next tokens, and drafts, may depend on ids that are still in flight.
        if in_flight and self._follows_grammars():
            events, in_flight = self._settle(), None
        batch = self._schedule(is_ahead=in_flight is not None)
        if batch is None:
            events, in_flight = self._settle(), None
            batch = self._schedule(is_ahead=False)
            assert batch is not None
        try:
            started = self._launch(batch, began_s)
        except BaseException as error:
            self.scheduler.roll_back(batch)
            if is_out_of_memory(error):
                self._runner.release_memory()
                events += self._settle()
                return events + self._told(batch, self.scheduler.relieve(batch))
            self._note_if_fatal(error)
            self._state = Unsettled(in_flight, events)
            raise
        if not self._runner.overlaps:
            return self._collect(started)
        self._state = Settled(started)
        return events + self._collect(in_flight)

    def _settle(self) -> list[TokenEvent]:
        """Wait for the batch in flight, if any, and collect it."""
        return self._collect(self._take_in_flight())

    def _follows_grammars(self) -> bool:
        """Whether a grammar limits what some request says."""
        return any(request.matcher is not None for request in self.scheduler.running)

    def _schedule(self, *, is_ahead: bool) -> ScheduledBatch | None:
        """The next batch, with drafts if there is a speculator; None if it wants to wait for the
        batch in flight, as which this one is scheduled `is_ahead` of.
        """
        budget = self.scheduler.config.max_num_batched_tokens
        running = self.scheduler.running
        resting = self._grammar_turns.resting(running)
        if resting:
            running = [request for request in running if request not in resting]
        drafts: Mapping[Request, Sequence[int]] | None = {}
        if self.speculator is not None:
            drafts = self.speculator.plan(running, is_ahead=is_ahead)
        if drafts is None:
            return None
        part = None
        if self._pacer is not None:
            if self.scheduler.answers_somebody:
                part = self._pacer.part(budget)
            else:
                self._pacer.rest()
        return self.scheduler.schedule(drafts, part, resting)

    def _launch(self, batch: ScheduledBatch, began_s: float) -> InFlight | None:
        """Start to compute a batch; None if it is empty."""
        if not batch.requests:
            return None
        planned = None if self.speculator is None else self.speculator.fill(batch)
        launched = self._runner.launch(batch)
        self._show(batch, launched.hidden)
        return InFlight(batch, launched, began_s, planned)

    def _show(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """Show a batch's hidden states to who needs them."""
        if batch.scores_prompts:
            assert self._scorer is not None
            *hidden, last = hidden
            self._scorer.see(batch, last)
        if self._pooler is not None:
            *hidden, last = hidden
            self._pooler.see(batch, last)
        if self.speculator is not None:
            self.speculator.beside(batch, hidden)

    def _told(self, batch: ScheduledBatch, events: list[TokenEvent]) -> list[TokenEvent]:
        """Add to events what comes beside tokens: a prompt's scores with its first token, and with
        its last event what was pooled, and what was drafted.
        """
        requests = [entry.request for entry in batch.requests]
        of_event = {(each.request_id, each.sample): each for each in requests}
        pooled: dict[int, bytes | None] = {}
        if self._pooler is not None:  # of those that were aborted too
            ended = (each for each in requests if each.status is RequestStatus.FINISHED)
            pooled = {each.request_id: self._pooler.take(each) for each in ended}
        told = []
        for event in events:
            request = of_event.get((event.request_id, event.sample))
            if request is not None and request.scores is not None and event.token_id is not None:
                event = event._replace(prompt_scores=request.scores.pack())
                request.scores = None
            if request is not None and event.finish_reason is not None:
                found, drafts = pooled.get(request.request_id), self._last_drafts(request)
                event = event._replace(pooled=found, drafts=drafts)
            told.append(event)
        return told

    def _take_in_flight(self) -> InFlight | None:
        match self._state:
            case Settled(in_flight):
                self._state = Settled()
                return in_flight
            case Unsettled(in_flight, events):
                self._state = Unsettled(None, events)
                return in_flight
            case Lost():
                return None

    def _collect(self, due: InFlight | None) -> list[TokenEvent]:
        """Wait for a batch and update scheduler, pacer and speculator; returns its events."""
        if due is None:
            return []
        try:
            sampled = due.launched.wait()
        except BaseException as error:
            # What was written to the cache is unknown, so these tokens are computed again.
            self._roll_back(self._take_in_flight())
            self._roll_back(due)
            self._note_if_fatal(error)
            raise
        events = self.scheduler.update(due.batch, sampled)
        now = time.perf_counter()
        seconds = now - max(due.began_s, self._collected_s)
        self._collected_s = now
        if self._pacer:
            _pace(self._pacer, due.batch, seconds)
        if self.speculator:
            self.speculator.learn(StepOutcome(due.batch, sampled, seconds, due.planned))
            self._learned_s = time.perf_counter() - now
        return self._told(due.batch, events)

    def _last_drafts(self, request: Request) -> tuple[DraftCount, ...]:
        """The drafts of a request that has ended, which is then forgotten."""
        if self.speculator is None:
            return ()
        return self.speculator.forget(request)

    def _roll_back(self, started: InFlight | None) -> None:
        if started is not None:
            self.scheduler.roll_back(started.batch)

    def _note_if_fatal(self, error: BaseException) -> None:
        """If the device is lost, raise DeviceError now and at every later call."""
        if is_fatal(error):
            lost = DeviceError(
                "the GPU reported an error, and nothing more can be computed in this process",
                where=str(error).partition("\n")[0],
                hint="start again; if it happens again, --backend torch shows whether one of "
                "localllm's kernels is at fault",
            )
            self._state = Lost(lost)
            raise lost from error

    def _check_alive(self) -> None:
        if isinstance(self._state, Lost):
            raise self._state.error


def _may_call(params: SamplingParams) -> bool:
    """Whether the answer may be a call: half of its arguments must not look like all of them."""
    return params.grammar is not None and params.grammar.kind == "calls"


def _pace(pacer: Pacer, batch: ScheduledBatch, seconds: float) -> None:
    """Tell the pacer about a step in which at least one request decoded."""
    answered = [entry for entry in batch.requests if entry.known_end - entry.start == 1]
    if answered:
        num_tokens = sum(entry.num_scheduled_tokens for entry in batch.requests)
        num_answers = sum(entry.num_scheduled_tokens for entry in answered)
        pacer.book(num_tokens - num_answers, seconds)
