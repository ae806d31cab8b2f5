"""Separates a model's thoughts from its answer.

Models that reason write their thoughts before the answer, between markers that their family was
trained on. The model's own chat template shows which markers those are.
"""

from dataclasses import dataclass

from localllm.text.stop_strings import longest_overlap


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts around a family's thoughts.

    `silent` are texts that belong to neither thoughts nor answer; a prompt that ends with `skip`
    makes the model answer at once; `keeps_newlines`: newlines at the beginning of an answer belong
    to it; `around`: texts before and after an answer; `calls_behind` and `calls_first`: texts that
    lead to a tool call, behind thoughts and without any. Such a call is the answer; it begins with
    `call`, the end of each of these texts.
    """

    opens: str
    closes: str
    skip: str
    silent: tuple[str, ...] = ()
    keeps_newlines: bool = False
    around: tuple[str, str] | None = None
    call: str = ""
    calls_behind: tuple[str, ...] = ()
    calls_first: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that is cut out of the model's text."""
        return (self.opens, self.closes, *self.silent, *(self.around or ()), *self.calls)

    @property
    def calls(self) -> tuple[str, ...]:
        """All texts that lead to a call."""
        return (*self.calls_behind, *self.calls_first)


def _tags(opens: str, closes: str) -> Markers:
    return Markers(opens, closes, skip=f"{opens}\n\n{closes}\n\n")


# The first family whose opening text occurs in the template is used.
FAMILIES = (
    # gpt-oss. Source: the "harmony" response format, openai/harmony, docs/format.md.
    Markers(
        opens="<|channel|>analysis<|message|>",
        closes="<|end|><|start|>assistant<|channel|>final<|message|>",
        skip="<|channel|>final<|message|>",
        silent=(
            "<|end|><|start|>assistant<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
        ),
        call="to=functions.",
        calls_behind=(
            "<|end|><|start|>assistant<|channel|>commentary to=functions.",
            "<|end|><|start|>assistant to=functions.",
        ),
        calls_first=("<|channel|>commentary to=functions.", " to=functions."),
    ),
    _tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    _tags("[THINK]", "[/THINK]"),  # Magistral
    _tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Markers("<|channel>thought\n", "<channel|>", skip="<|channel>thought\n<channel|>"),  # Gemma 4
    Markers(  # Command R7B and A
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        skip="<|START_THINKING|><|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    # Qwen3, QwQ, the DeepSeek-R1 distills, SmolLM3, GLM and most others.
    _tags("<think>", "</think>"),
)


def find_markers(template: str) -> Markers | None:
    """The markers of the family whose chat template this is, None if it does not think."""
    return next((family for family in FAMILIES if family.opens.rstrip() in template), None)


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of a model's text, split into thoughts and answer."""

    thinking: str = ""
    answer: str = ""


class ThinkingSplitter:
    """Splits a growing text into thoughts and answer; joined, the two hold everything but markers.

    Thoughts are only searched for at the beginning of the text (`is_open`: the prompt has already
    begun them): later, an opening marker is ordinary text. Newlines around the markers are dropped,
    unless the answer keeps its own. Without markers, everything is the answer.
    """

    def __init__(self, markers: Markers | None, is_open: bool = False) -> None:
        self._markers = markers
        self._is_thinking = is_open
        self._may_open = markers is not None and not is_open
        self._is_start = True  # of thoughts or answer, where newlines are dropped
        self._has_thought = False
        self._held = ""
        around = None if markers is None else markers.around
        self._answer = None if around is None else _Unwrapper(*around)

    def push(self, piece: str) -> Split:
        """What `piece` adds; the start of what may become a marker is held back."""
        added = self._split(piece)
        if self._answer is None:
            return added
        return Split(added.thinking, self._answer.push(added.answer))

    def flush(self) -> Split:
        """The text that is still held back; call it at the end."""
        held, self._held = self._held, ""
        if self._is_thinking:
            return Split(thinking=held.rstrip("\n"))
        return Split(answer=held if self._answer is None else self._answer.push(held, is_last=True))

    def _split(self, piece: str) -> Split:
        if not (self._is_thinking or self._may_open or (self._is_start and self._markers)):
            return Split(answer=piece)
        self._held += piece
        thinking, answer = "", ""
        while True:
            added, goes_on = self._take()
            thinking, answer = thinking + added.thinking, answer + added.answer
            if not goes_on:
                return Split(thinking, answer)

    def _take(self) -> tuple[Split, bool]:
        """Text up to the next marker, and whether there is more to take after it."""
        markers = self._markers
        if markers is None:
            return self._answer_with(self._held), False
        if self._is_start and (self._is_thinking or not markers.keeps_newlines):
            self._held = self._held.lstrip("\n")
        if self._is_thinking:
            return self._take_thought(markers)
        if not self._may_open:
            return self._answer_with(self._held), False
        text = self._held
        if not text:
            return Split(), False
        starts = [marker for marker in markers.texts if text.startswith(marker)]
        if starts:
            marker = max(starts, key=len)
            is_call = marker in markers.calls
            self._held = (markers.call if is_call else "") + text[len(marker) :]
            self._is_thinking = marker == markers.opens
            self._may_open = not (self._is_thinking or is_call) and marker != markers.closes
            self._is_start = True
            return Split(), True
        if any(marker.startswith(text) for marker in markers.texts):
            return Split(), False
        self._may_open = False
        return self._answer_with(self._held), False

    def _take_thought(self, markers: Markers) -> tuple[Split, bool]:
        ends = (markers.closes, *markers.calls_behind)
        inside = (*ends, *markers.silent)
        found = [(self._held.find(text), text) for text in inside if text in self._held]
        if found:
            at, marker = min(found, key=lambda each: (each[0], -len(each[1])))
            thought, self._held = self._held[:at], self._held[at + len(marker) :]
            if marker in markers.calls:
                self._held = markers.call + self._held
            self._is_thinking = marker not in ends
            self._is_start = True
            self._has_thought = self._has_thought or bool(thought)
            # Two thoughts are separated like two paragraphs.
            end = "\n\n" if self._is_thinking and self._has_thought else ""
            return Split(thinking=thought.rstrip("\n") + end), True
        keep = max(longest_overlap(self._held, marker) for marker in inside)
        body = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(body) :]
        self._is_start = self._is_start and not body
        self._has_thought = self._has_thought or bool(body)
        return Split(thinking=body), False

    def _answer_with(self, text: str) -> Split:
        self._held = ""
        if text:
            self._is_start = False
        return Split(answer=text)


class _Unwrapper:
    """Cuts a growing answer out of the texts before and after it."""

    def __init__(self, before: str, after: str) -> None:
        self._before, self._after = before, after
        self._held, self._is_over = "", False

    def push(self, piece: str, *, is_last: bool = False) -> str:
        """What is certain to belong to the answer, all of it if `is_last`."""
        text, self._held = self._held + piece, ""
        if self._is_over:
            return ""
        if self._before.startswith(text) and text != self._before and not is_last:
            self._held = text
            return ""
        if self._before:
            text, self._before = text.removeprefix(self._before), ""
        at = text.find(self._after)
        if at >= 0:
            self._is_over = True
            return text[:at]
        keep = 0 if is_last else longest_overlap(text, self._after)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
