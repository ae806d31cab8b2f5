"""Token ids in, token events out: the step loop over scheduler, runner and sampler."""

import secrets
import time
from collections.abc import Callable, Sequence

from localllm.engine.device import is_fatal, is_out_of_memory
from localllm.engine.engine_state import EngineState, InFlight, Lost, Settled, Unsettled
from localllm.engine.grammar_turns import GrammarTurns
from localllm.engine.matcher import Matcher
from localllm.engine.pacing import Pacer
from localllm.engine.prefix_disk import PrefixDisk
from localllm.engine.request import FinishReason, Request, RequestStatus, TokenEvent
from localllm.engine.request_check import EngineLimits
from localllm.engine.runner import Runner
from localllm.engine.sampler import sample_seed
from localllm.engine.sampling_params import SamplingParams
from localllm.engine.scheduler import ScheduledBatch, Scheduler
from localllm.engine.speculation import Speculator
from localllm.errors import DeviceError


class Engine:
    """Runs any number of requests at once; the caller drives it with `step`.

    Where the runner overlaps, a step schedules and starts a batch while the one before is
    computed, and brings the tokens of that. Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: EngineLimits,
        speculator: Speculator | None = None,
        prefix_disk: PrefixDisk | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        """`prefix_disk`: the scheduler's store, written to in moments without requests. `pacer`:
        how long who is answered waits for who is read; without one, for whole steps.
        """
        self.limits = limits
        self.scheduler = scheduler
        self._runner = runner
        self.speculator = speculator
        self._prefix_disk = prefix_disk
        self._pacer = pacer
        self._grammar_turns = GrammarTurns()
        self._collected_s = 0.0
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
        """Another engine on the same model and cache, to be measured against this one; of the two
        one may have requests at a time. `scheduler` has this one's pool, or is this one's.
        """
        chosen = scheduler or self.scheduler
        return Engine(wrap(self._runner), chosen, self.limits, speculator, pacer=pacer)

    @property
    def context_length(self) -> int:
        """The longest request, prompt and answer together."""
        return min(self.limits.max_model_len, self.scheduler.max_request_tokens)

    @property
    def way_to_longer_context(self) -> str:
        """What a user can do for a longer one."""
        return self.limits.way_to_longer_context(self.scheduler.max_request_tokens)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        matcher: Matcher | None = None,
    ) -> int:
        """Queue a request of `params.n` samples; returns its id, which its events carry.

        The answer is clipped to the room left in the context. What requests of one `salt` have
        computed or said makes those of another no faster, so that nobody learns of it by the clock.
        `matcher` stands at the beginning of the answer; it is that of the first sample from now on.

        Raises: RequestError for token ids out of range; ContextLengthError for a prompt that
        leaves no room for a single new token. Other requests are not touched. DeviceError: see
        `step`.
        """
        self._check_alive()
        self.limits.check(prompt_token_ids, params, self.scheduler.max_request_tokens)
        num_prompt = len(prompt_token_ids)
        room = self.context_length - num_prompt
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request_id = self._next_request_id
        self._next_request_id += 1
        if matcher is not None:
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
                matcher=matcher if sample == 0 or matcher is None else matcher.copy(),
                needs_ids=matcher is not None or self._runner.needs_ids(params),
            )
            first = first or request
            self.scheduler.add(request)
            if self.speculator:
                self.speculator.add(request)
        return request_id

    def prompt_progress(self, request_id: int) -> tuple[int, int] | None:
        """Tokens of a request's prompt that are computed, and all of them; None once it has ended.
        May be asked from another thread.
        """
        for request in self.scheduler.unfinished():
            if request.request_id == request_id:
                num_prompt = request.num_prompt_tokens
                return min(request.num_computed_tokens, num_prompt), num_prompt
        return None

    def has_unfinished(self) -> bool:
        """Whether `step` has work, or events that nobody got yet."""
        has_events = isinstance(self._state, Unsettled) and bool(self._state.events)
        return self.scheduler.has_unfinished() or has_events

    def step(self) -> list[TokenEvent]:
        """Start the next batch, and book the one whose tokens are due.

        Where memory does not suffice for a batch, its largest request starts again in smaller
        steps; if that is not enough either, it ends with an error, and no other.

        Raises: DeviceError where the device is lost, and from then on at every call.
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
        """Do a little of what will make later steps faster, in a moment without requests; False
        where nothing is left to do.
        """
        if self.has_unfinished():
            return False
        self._settle()  # of requests that have ended
        if self._prefix_disk is not None and self._prefix_disk.save_next():
            return True
        drafts = self.speculator
        try:
            # Who drafts is made ready before anything is tuned, which takes minutes.
            if drafts is not None and self._runner.is_warm and not drafts.is_warm:
                return drafts.work_ahead()
            return self._runner.work_ahead() or (drafts is not None and drafts.work_ahead())
        except Exception as error:
            self._note_if_fatal(error)
            raise

    @property
    def is_warm(self) -> bool:
        """Whether no request has to wait for what `work_ahead` makes for steps: kernels, graphs."""
        return self._runner.is_warm and (self.speculator is None or self.speculator.is_warm)

    def finish(self) -> None:
        """End all requests, and save what is to be kept."""
        for request in self.scheduler.unfinished():
            self.abort(request.request_id, request.sample)
        self._settle()
        while self._prefix_disk is not None and self._prefix_disk.save_next():
            pass

    def abort(self, request_id: int, sample: int | None = None) -> list[TokenEvent]:
        """End a request, or one sample of it, now; its blocks are free at once.

        Returns the last events of the samples that were not finished.
        """
        ended = self.scheduler.abort(request_id, sample)
        if self.speculator:
            for request in ended:
                self.speculator.forget(request)
        return [
            TokenEvent(request_id, request.sample, None, FinishReason.ABORT) for request in ended
        ]

    def _advance(self, in_flight: InFlight | None) -> list[TokenEvent]:
        """Start the next batch while another may be in flight, and book what is due."""
        began_s = time.perf_counter()
        events: list[TokenEvent] = []
        has_waited = False
        if in_flight:
            has_waited = self.speculator is not None and self.speculator.wants_ids()
            if has_waited or self._follows_grammars():
                events, in_flight = self._settle(), None
        batch = self._schedule()
        try:
            started = self._launch(batch, began_s, has_waited)
        except BaseException as error:
            self.scheduler.roll_back(batch)
            if is_out_of_memory(error):
                self._runner.release_memory()
                return events + self._settle() + self.scheduler.relieve(batch)
            self._note_if_fatal(error)
            self._state = Unsettled(in_flight, events)
            raise
        if not self._runner.overlaps:
            return self._collect(started)
        self._state = Settled(started)
        return events + self._collect(in_flight)

    def _settle(self) -> list[TokenEvent]:
        """Wait for what is in flight, and book it."""
        return self._collect(self._take_in_flight())

    def _follows_grammars(self) -> bool:
        """Whether what may come next depends on ids that are still on their way."""
        return any(request.matcher is not None for request in self.scheduler.running)

    def _schedule(self) -> ScheduledBatch:
        """The next batch, with drafts where somebody makes them."""
        budget = self.scheduler.config.max_num_batched_tokens
        part = None
        if self._pacer is not None:
            if self.scheduler.answers_somebody:
                part = self._pacer.part(budget)
            else:
                self._pacer.rest()
        running = self.scheduler.running
        resting = self._grammar_turns.resting(running)
        if self.speculator is None:
            return self.scheduler.schedule(None, part, resting)
        if resting:
            running = [request for request in running if request not in resting]
        return self.scheduler.schedule(self.speculator.propose(running, budget), part, resting)

    def _launch(self, batch: ScheduledBatch, began_s: float, has_waited: bool) -> InFlight | None:
        """Start to compute a batch; None where there is nothing in it."""
        if not batch.requests:
            return None
        if self.speculator is None or not self.speculator.is_watching:
            launched = self._runner.launch(batch)
            if self.speculator is not None:
                self.speculator.see(batch, launched.hidden)
            return InFlight(batch, launched, began_s, has_waited, False)
        self.speculator.complete(batch)
        launched = self._runner.launch(batch)
        self.speculator.see(batch, launched.hidden)
        self.speculator.work(batch)
        return InFlight(batch, launched, began_s, has_waited, True)

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
        """Wait for a batch and book it."""
        if due is None:
            return []
        try:
            sampled = due.launched.wait()
        except BaseException as error:
            # Nobody knows what was written; whoever steps on computes it again.
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
            if due.is_watched:
                self.speculator.learn(due.batch, sampled, seconds, due.has_waited)
            for entry in due.batch.requests:
                if entry.request.status is RequestStatus.FINISHED:
                    self.speculator.forget(entry.request)
        return events

    def _roll_back(self, started: InFlight | None) -> None:
        if started is not None:
            self.scheduler.roll_back(started.batch)

    def _note_if_fatal(self, error: BaseException) -> None:
        """Raise, now and at every later call, where the device is lost."""
        if is_fatal(error):
            lost = DeviceError(
                "the GPU reported an error after which nothing more can be computed here",
                where=str(error).partition("\n")[0],
                hint="start again; if it happens again, --backend torch tells whether one of our "
                "kernels is at fault",
            )
            self._state = Lost(lost)
            raise lost from error

    def _check_alive(self) -> None:
        if isinstance(self._state, Lost):
            raise self._state.error


def _pace(pacer: Pacer, batch: ScheduledBatch, seconds: float) -> None:
    """Book a step in which somebody was answered."""
    answered = [entry for entry in batch.requests if entry.known_end - entry.start == 1]
    if answered:
        num_tokens = sum(entry.num_scheduled_tokens for entry in batch.requests)
        num_answers = sum(entry.num_scheduled_tokens for entry in answered)
        pacer.book(num_tokens - num_answers, seconds)
