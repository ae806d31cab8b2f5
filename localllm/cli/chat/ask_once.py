"""`chat` with a question: ask it, print the answer, and say what was cut or dropped."""

from typing import TYPE_CHECKING

from localllm.chat.transcript import Transcript, make_title
from localllm.cli.chat.answer import AnswerPrinter
from localllm.cli.chat.request import ChatRequest, is_on_terminal
from localllm.cli.chat.saved import question_saved
from localllm.cli.draw.figures import describe_prompt, describe_truncation
from localllm.cli.draw.output import note
from localllm.cli.draw.render import make_printer
from localllm.errors import LocalLLMError
from localllm.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from localllm.answer.completion import Completion
    from localllm.answer.event_stream import EventStream
    from localllm.chat.conversation import ChatSession
    from localllm.chat.recorder import Recorder


def ask_once(request: ChatRequest, text: str) -> int:
    """Print the answer to `text` and return the exit code. Raises: LocalLLMError."""
    recorder = _recorder(request)
    with question_saved(recorder, _transcript(request).asking(text, request.model or "")):
        session = request.open_session()
        _note_unanswered(session, text)
        params = session.model.sampling_params(**request.sampling)
        completion, events = session.reply(text, params)
    if recorder is not None:
        _keep_saved(recorder, session, events)
    printer = _print(request, session, params, completion, events)
    _check_form(request, params, completion)
    _note_cut(request, session, completion)
    if request.flags.answer.why:
        for line in describe_prompt(session.report_cache(), completion):
            note(line, dim=True)
    session.close()
    return printer.exit_code(request.flags.answer.fail_on_length)


def _recorder(request: ChatRequest) -> "Recorder | None":
    """The recorder; in a pipe or a script only if --session or --continue asks for saving."""
    is_typed = is_on_terminal() and request.form == "text"
    return request.recorder if request.flags.conversation.goes_on or is_typed else None


def _transcript(request: ChatRequest) -> Transcript:
    """The conversation so far."""
    if request.saved is None:
        return Transcript(request.model or "", request.system, (), request.title)
    return request.saved.transcript


def _note_unanswered(session: "ChatSession", text: str) -> None:
    if session.unanswered not in (None, text):
        title = make_title(session.unanswered or "")
        note(f"not answered: {title}; it stays in the conversation", dim=True)


def _keep_saved(recorder: "Recorder", session: "ChatSession", events: "EventStream") -> None:
    recorder.save(session.transcript())
    events.on_event.append(lambda _: recorder.flush(session.transcript))
    events.on_close.append(lambda: recorder.save(session.transcript()))


def _print(
    request: ChatRequest,
    session: "ChatSession",
    params: SamplingParams,
    completion: "Completion",
    events: "EventStream",
) -> AnswerPrinter:
    if completion.truncation is not None:
        note(describe_truncation(completion.truncation), dim=True)
    note_lost_template(session)
    printer = AnswerPrinter(
        session.model,
        completion,
        params,
        make_printer(request.render, is_markdown=not session.completes_text),
        "hide" if request.flags.answer.hide_thinking else "show",
    )
    printer.print(events, request.form)
    return printer


def note_lost_template(session: "ChatSession") -> None:
    """Say that a model continues text for want of a template."""
    if not (session.raw or session.model.has_chat_template):
        note(f"{session.model.name} has no chat template: it continues the text", dim=True)


def _check_form(request: ChatRequest, params: SamplingParams, completion: "Completion") -> None:
    """Note a stop string that cut a form. Raises: as `check_remote_form`."""
    if not request.has_grammar:
        return
    if completion.stop_string is not None:
        note(f"cut at the stop string {completion.stop_string!r}; the answer is incomplete")
    check_remote_form(request, params, completion)


def check_remote_form(
    request: ChatRequest, params: SamplingParams, completion: "Completion"
) -> None:
    """Raises: LocalLLMError if a server, which may ignore fields it does not know, returned an
    answer that does not match the requested format.
    """
    is_whole = completion.finish_reason == "stop" and not params.stop
    if request.has_grammar and request.flags.prompt.remote is not None and is_whole:
        from localllm.answer.grammar_compiler import is_matched

        if not is_matched(request.sampling["grammar"], completion.text):
            raise LocalLLMError(
                "the server's answer does not match the requested format",
                hint="a server that supports response_format and structured_outputs, such as "
                "localllm's",
            )


def _note_cut(request: ChatRequest, session: "ChatSession", completion: "Completion") -> None:
    is_text = request.form == "text" and "max_tokens" not in request.sampling
    if completion.finish_reason != "length" or not (request.has_grammar or is_text):
        return
    is_full = completion.num_context_tokens >= session.model.context.length
    limit = "the context is full" if is_full else "-n sets the limit"
    cut = "; the answer is incomplete" if request.has_grammar else ""
    told = f"cut after {completion.num_generated_tokens} tokens{cut}; {limit}"
    note(told, dim=not request.has_grammar)
