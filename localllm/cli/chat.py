"""`localllm chat`: one answer, or a conversation on a terminal."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.answer.overflow import OVERFLOW_POLICIES
from localllm.chat.transcript import Transcript, make_title
from localllm.cli import flag_values, options, suggestions
from localllm.cli.answer import AnswerForm, AnswerPrinter
from localllm.cli.figures import describe_prompt, describe_truncation
from localllm.cli.opening import open_noted
from localllm.cli.output import choose_colour, is_terminal, note
from localllm.cli.render import Shown, check_render_mode, make_printer
from localllm.cli.saved import find_session, open_recorder, question_saved
from localllm.cli.text_files import names_files, read_files
from localllm.cli.user_input import gather_prompt, read_file
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import LocalLLMError, RequestError
from localllm.hub.catalog import is_file, is_model_name, looks_like_model, unknown_model
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from localllm.answer.loaded_model import LoadedModel
    from localllm.chat.conversation import ChatSession
    from localllm.text.prompt import ThinkLevel


def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A model (alias, org/name or folder) and a prompt; each may be left out.",
            show_default=False,
            autocompletion=suggestions.models,
        ),
    ] = None,
    model_flag: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", help="The model, beyond doubt.", autocompletion=suggestions.models
        ),
    ] = None,
    prompt_flag: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt, beyond doubt.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "-f",
            "--file",
            help="Put files before the prompt: a path, a folder, '*.py'.",
            metavar="PATH",
        ),
    ] = None,
    system: Annotated[str | None, options.option("-s", "--system", help="System prompt.")] = None,
    system_file: Annotated[
        Path | None, options.option("--system-file", help="System prompt from a file.")
    ] = None,
    raw: Annotated[
        bool, options.option("--raw", help="Complete the prompt as it stands, without template.")
    ] = False,
    json_output: Annotated[
        bool, options.option("--json", help="The answer and its figures as one JSON object.")
    ] = False,
    stream_json: Annotated[
        bool, options.option("--stream-json", help="One JSON object per event, a line each.")
    ] = False,
    extract_code: Annotated[
        bool, options.option("--extract-code", help="Only the first fenced code block.")
    ] = False,
    session_name: Annotated[
        str | None,
        options.option(
            "--session",
            help="Go on with the conversation of this name, or begin it.",
            suggest=suggestions.sessions,
        ),
    ] = None,
    continue_last: Annotated[
        bool, typer.Option("--continue", help="Go on with the last conversation.")
    ] = False,
    no_save: Annotated[
        bool, options.option("--no-save", help="Do not save the conversation.")
    ] = False,
    overflow: Annotated[
        str,
        options.option(
            "--overflow", help="A conversation that gets too long.", choices=OVERFLOW_POLICIES
        ),
    ] = "error",
    format_: options.Format = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    keepalive: options.Keepalive = None,
    remote: Annotated[
        str | None,
        options.option("--remote", help="Ask an OpenAI-compatible server.", metavar="URL"),
    ] = None,
    api_key: Annotated[str | None, options.option("--api-key", help="Its key.")] = None,
    why: Annotated[
        bool, options.option("--why", help="Tell what of the prompt came from the cache.")
    ] = False,
    fail_on_length: Annotated[
        bool, options.option("--fail-on-length", help="Exit 9 when the answer is cut.")
    ] = False,
    think: options.Think = None,
    hide_thinking: options.HideThinking = False,
    parse_special: options.ParseSpecial = False,
    render: options.Render = "auto",
    color: Annotated[
        str,
        options.option(
            "--color",
            help="Colours (also NO_COLOR, FORCE_COLOR).",
            choices=("auto", "always", "never"),
        ),
    ] = "auto",
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    max_tokens: options.MaxTokens = None,
    logprobs: options.Logprobs = None,
    greedy: options.Greedy = False,
    ctx: options.Context = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    reserve: options.Reserve = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    no_prefix_cache: options.NoPrefixCache = False,
    cache_disk: options.CacheDisk = None,
    cache_dir: options.CacheDir = None,
    backend: options.Backend = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    self_check: options.SelfCheck = True,
    dtype: options.DTypeName = "auto",
    kv_cache_dtype: options.KVCacheDTypeName = "auto",
    deterministic: options.Deterministic = False,
    spec: options.Spec = options.SPEC,
    spec_max: options.SpecMax = options.SPEC_MAX,
    spec_ngram: options.SpecNgram = options.SPEC_NGRAM,
) -> int:
    """Chat with a model, or get one answer.

    With a prompt, --file or piped input: one answer on stdout. Else, on a terminal: a
    conversation. The model defaults to $LOCALLLM_MODEL, then to `default_model` of your settings,
    then to the small one that is built in.
    """
    choose_colour(color)
    files, left = split_files(file or [], words or [])
    chosen = choose_model_and_prompt(left, model_flag, prompt_flag, is_remote=remote is not None)
    sampling = options.SamplingFlags(
        temp,
        top_k,
        top_p,
        min_p,
        repeat_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        stop,
        ignore_eos,
        max_tokens,
        logprobs,
        greedy,
    ).given()
    answer_grammar = options.parse_grammar(format_, json_schema, regex, grammar)
    if answer_grammar is not None:
        sampling["grammar"] = answer_grammar
    engine = options.EngineFlags(
        ctx,
        gpu_memory_utilization,
        reserve,
        max_num_seqs,
        max_num_batched_tokens,
        no_prefix_cache,
        backend,
        device,
        dtype,
        kv_cache_dtype,
        deterministic,
        flag_values.parse_speculation(spec, spec_max, spec_ngram),
        cache_disk=None if no_save else cache_disk,  # a conversation can be told from it
        cache_dir=cache_dir,
        threads=threads,
        self_check=self_check,
    ).config(default_max_num_seqs=1)
    form = choose_form(json_output, stream_json, extract_code)
    if logprobs is not None and form not in ("json", "stream-json"):
        raise RequestError("--logprobs needs --json or --stream-json", param="logprobs")
    think_level, render_mode = flag_values.parse_think(think), check_render_mode(render)
    if answer_grammar is not None:
        render_mode = "plain"  # to the letter
    text = gather_prompt(chosen.prompt, read_files(files))
    on_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if text is None and (not on_terminal or form != "text"):
        raise RequestError(
            "no prompt, and no terminal to ask for one"
            if not on_terminal
            else "a conversation is shown as text: --json, --stream-json and --extract-code are "
            "for one answer",
            param="prompt",
            hint='localllm chat "your question", or pipe some text into it',
        )
    if system_file is not None:
        if system is not None:
            raise RequestError("--system and --system-file exclude each other")
        system = read_file(system_file).strip("\n")
    if raw and system is not None:
        raise RequestError("--raw has no place for a system prompt", hint="leave out one of them")
    SamplingParams(**sampling)  # bad values are refused before the model is opened
    policy = flag_values.parse_overflow(overflow)
    recorder = None if no_save else open_recorder()
    saved = None
    if session_name is not None or continue_last:
        if recorder is None:
            raise RequestError("--no-save excludes --session and --continue")
        saved = find_session(recorder, session_name, goes_on=continue_last)
    name = chosen.model
    if saved is not None and not chosen.is_said:
        name = saved.transcript.model or name
    # Nothing here holds the model itself: a conversation may exchange it.
    keepalive_s = flag_values.parse_keepalive(keepalive)

    def load() -> "LoadedModel":
        if remote is None:
            is_conversation = text is None
            return open_noted(
                name, engine, is_conversation=is_conversation, keepalive_s=keepalive_s
            )
        from localllm.attach.remote import open_remote

        return open_remote(remote, name, api_key)

    def open_session() -> "ChatSession":
        session = start_session(load(), system=system, raw=raw, think=think_level)
        session.parse_special, session.overflow = parse_special, policy
        if saved is not None:
            session.system = session.system or saved.transcript.system
            session.restore(saved.transcript.turns)
        return session

    if text is None:
        from localllm.cli.repl import Repl
        from localllm.cli.slash_turns import recall

        shown = Shown(render_mode, "hide" if hide_thinking else "fold", shows_why=why)
        repl = Repl(open_session(), engine, sampling, shown, recorder)
        if saved is not None:
            recall(repl, saved.transcript)
        return repl.run()
    # What runs in a pipe or a script is saved where that is asked for.
    is_asked_for = continue_last or session_name is not None
    if not is_asked_for and not (on_terminal and form == "text"):
        recorder = None
    so_far = Transcript(name or "", system, ()) if saved is None else saved.transcript
    with question_saved(recorder, so_far.asking(text, name or "")):
        session = open_session()
        if session.unanswered not in (None, text):
            title = make_title(session.unanswered or "")
            note(f"not answered: {title}; it stays in the conversation, which goes on", dim=True)
        params = session.model.sampling_params(**sampling)
        completion, events = session.reply(text, params)
    if recorder is not None:
        recorder.save(session.transcript())
        events.on_event.append(lambda _: recorder.flush(session.transcript))
        events.on_close.append(lambda: recorder.save(session.transcript()))
    if completion.truncation is not None:
        note(describe_truncation(completion.truncation), dim=True)
    printer = AnswerPrinter(
        session.model,
        completion,
        params,
        make_printer(render_mode, is_markdown=not session.completes_text),
        "hide" if hide_thinking else "show",
    )
    printer.print(events, form)
    is_form = answer_grammar is not None
    if completion.stop_string is not None and is_form:
        note(f"cut at the stop string {completion.stop_string!r}; the form is not complete")
    is_whole = completion.finish_reason == "stop" and not params.stop
    if remote is not None and answer_grammar is not None and is_whole:
        from localllm.answer.grammar_compiler import is_matched

        # A server may leave aside what it does not know.
        if not is_matched(answer_grammar, completion.text):
            raise LocalLLMError(
                "the server's answer has not the form that was asked for",
                hint="a server that knows response_format and structured_outputs, as localllm's",
            )
    if completion.finish_reason == "length" and (is_form or (form == "text" and not max_tokens)):
        is_full = completion.num_context_tokens >= session.model.context_length
        limit = "the context is full" if is_full else "-n sets the limit"
        cut = "; the form is not complete" if is_form else ""
        note(f"cut after {completion.num_generated_tokens} tokens{cut}; {limit}", dim=not is_form)
    if why:
        for line in describe_prompt(session.report_cache(), completion):
            note(line, dim=True)
    session.close()
    return printer.exit_code(fail_on_length)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the arguments mean; None where nothing was said. `is_said`: the model, and not by the
    environment.
    """

    model: str | None
    prompt: str | None
    is_said: bool


def split_files(given: Sequence[str], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files for the prompt, and the other words: behind `-f` a shell puts the first file of
    `src/*.py`, and the others among the words. `-` is stdin, which is read anyway.
    """
    files = [name for name in given if name != "-"]
    if not files:
        return [], list(words)
    is_another = [
        is_file(word) or (names_files(word) and not is_model_name(word)) for word in words
    ]
    files += [word for word, is_one in zip(words, is_another, strict=True) if is_one]
    others = [word for word, is_one in zip(words, is_another, strict=True) if not is_one]
    if len(others) > 1 and not is_model_name(others[0]):
        suffix = Path(others[0]).suffix
        if suffix and suffix in (Path(name).suffix for name in files):
            raise RequestError(f"there is no file {others[0]!r:.200}", param="file")
    return files, others


def choose_model_and_prompt(
    words: Sequence[str],
    model_flag: str | None,
    prompt_flag: str | None,
    *,
    is_remote: bool = False,
) -> Choice:
    """Which of the words is the model: the first of two; a lone one only if it is a model's name,
    which those of a server are not.

    Raises: RequestError where both an argument and a flag give the same thing; CatalogError for a
    lone word that is like a model's name, and is none.
    """
    if len(words) > 2:
        raise RequestError(
            f"{len(words)} words, where a model and a prompt are meant",
            hint=f"quotes around the prompt: localllm chat {shlex.quote(' '.join(words))}",
        )
    first, second = (*words, None, None)[:2]
    model, prompt = model_flag, prompt_flag
    if first is not None and second is not None:
        if model_flag is not None or prompt_flag is not None:
            raise RequestError(
                "model or prompt is given twice", hint="leave out -m, -p or one word"
            )
        model, prompt = first, second
    elif first is not None:
        _refuse_file(first)
        is_model = is_model_name(first) and not is_remote
        if model_flag is None and (prompt_flag is not None or is_model):
            model = first
        elif prompt_flag is None:
            prompt = first
            if model_flag is None and not is_remote and looks_like_model(first):
                raise unknown_model(
                    first, f"localllm plan lists models; as a question: -p {shlex.quote(first)}"
                )
        else:
            raise RequestError("model and prompt are given twice", hint="leave out -m or -p")
    named = model if is_remote else model or default_model()
    return Choice(named, prompt, is_said=model is not None)


def _refuse_file(word: str) -> None:
    """Raises: RequestError for a file in the place of a question or a model."""
    if is_file(word):
        raise RequestError(
            f"{word} is a file, neither a question nor a model",
            hint=f"-f {shlex.quote(word)} puts it before a question; a model is a folder",
        )


def choose_form(json_output: bool, stream_json: bool, extract_code: bool) -> AnswerForm:
    """The form that the flags ask for. Raises: RequestError for more than one."""
    asked: list[AnswerForm] = []
    if json_output:
        asked.append("json")
    if stream_json:
        asked.append("stream-json")
    if extract_code:
        asked.append("code")
    if len(asked) > 1:
        raise RequestError("--json, --stream-json and --extract-code exclude each other")
    return asked[0] if asked else "text"


def start_session(
    loaded: "LoadedModel", *, system: str | None, raw: bool, think: "ThinkLevel | None"
) -> "ChatSession":
    """A conversation with the model; what it cannot do is noted."""
    from localllm.chat.conversation import ChatSession

    session = ChatSession(loaded, system, raw=raw)
    session.think = think
    if think is not None and (session.completes_text or not loaded.tokenizer.can_think):
        note(f"{loaded.name} does not think; --think changes nothing", dim=True)
    return session
