"""What people type first who know other tools, and what they are told where it is something else.

Found by trying twenty tasks with no more than the README.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from window import Open

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.chat.words import split_files
from localllm.cli.flags.foreign import translated
from localllm.cli.main import app
from localllm.errors import CatalogError, ExitCode
from localllm.hub.catalog import CatalogEntry, is_model_name, load_catalog, resolve_model
from localllm.hub.local_models import find_local_models
from localllm.hub.removal import plan_removals
from localllm.user.places import cache_folder, sessions_file

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("qwen3:0.6b", "qwen3-0.6b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("llama3.2", "llama-3.2-3b"),
        ("llama3.2:latest", "llama-3.2-3b"),
        ("llama3.2:1b-instruct-q4_K_M", "llama-3.2-1b"),
        ("mistral", "mistral-7b"),
        ("phi4", "phi-4"),
        ("qwen2.5-coder:0.5b", "qwen2.5-coder-0.5b"),
        ("ollama/llama3.2", "llama-3.2-3b"),
        ("https://ollama.com/library/gemma3:1b", "gemma3-1b"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("Qwen3 0.6B", "qwen3-0.6b"),
        (" qwen3-0.6b ", "qwen3-0.6b"),
        ("https://huggingface.co/Org/Name/tree/main", "Org/Name"),
        ("https://huggingface.co/Org/Name/blob/v2/config.json?x=1#L5", "Org/Name@v2"),
        ("www.huggingface.co/Org/Name/", "Org/Name"),
        ("hf.co/Org/Name", "Org/Name"),
        ("hf://Org/Name", "Org/Name"),
        ("Org/Name/", "Org/Name"),
        ("qwen/QWEN3-0.6b", "Qwen/Qwen3-0.6B"),
        ("POCKET", "pocket"),
        ("pocket:latest", "pocket"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_model_is_known_by_other_spellings(typed: str, meant: str) -> None:
    assert resolve_model(typed).name == meant


def test_a_folder_that_the_shell_did_not_expand_is_found(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint()
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model(f"~/{folder.name}").folder == folder
    assert is_model_name(f"~/{folder.name}/")
    monkeypatch.chdir(folder.parent)
    assert resolve_model(f"./{folder.name}/").folder == Path(folder.name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("https://github.com/org/name", "not an address of a model on the hub"),
        ("Org/Name:a:b", "unknown model"),
    ],
)
def test_a_name_that_says_too_much_is_refused(name: str, told: str) -> None:
    with pytest.raises(CatalogError) as caught:
        resolve_model(name)
    assert told in str(caught.value)


@pytest.mark.parametrize("word", ["phi 4", "Qwen3 0.6B", "note:this", "and/or: which?"])
def test_a_question_of_two_words_names_no_model(word: str) -> None:
    assert not is_model_name(word)


def parsed(command: str, *words: str) -> list[str]:
    found: Any = typer.main.get_command(app)
    one = found.commands[command]
    context = one.make_context(command, [], resilient_parsing=True)
    return translated(words, one.get_params(context))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("-hf org/repo hi", "--model org/repo hi"),
        ("--hf-repo=org/repo", "--model=org/repo"),
        ("--ctx-size 4k --n-predict=5", "--ctx 4k --max-tokens=5"),
        ("--num-ctx 4096 --num-predict -1", "--ctx 4096 --max-tokens -1"),
        ("--max_tokens 5 --top_p=0.9", "--max-tokens 5 --top-p=0.9"),
        ("-seed 5 -temp 1", "--seed 5 --temp 1"),
        ("--max-new-tokens 5 --repetition-penalty 1.1", "--max-tokens 5 --repeat-penalty 1.1"),
        ("-sys Be.brief -t 4", "--system Be.brief --threads 4"),
        ("--stop -hf -n20 -fREADME.md", "--stop -hf -n20 -fREADME.md"),
        ("-5+3 -n 4", "-n 4 -- -5+3"),
        ("pocket --- -n 4", "pocket -n 4 -- ---"),
        ("- -- -x", "- -- -x"),
    ],
)
def test_flags_of_other_programs_are_ours(typed: str, meant: str) -> None:
    assert parsed("chat", *typed.split()) == meant.split()


def test_a_folder_is_named_where_a_command_takes_it() -> None:
    assert parsed("quantize", "-o", "out", "x", "--bits", "4") == ["x", "--bits", "4", "out"]
    assert parsed("quantize", "x", "--output-dir=out") == ["x", "out"]
    assert parsed("quantize", "-m", "x", "-o", "out") == ["x", "out"]


def test_a_model_is_named_where_a_command_takes_it() -> None:
    assert parsed("serve", "-np", "4", "-m", "x") == ["--max-num-seqs", "4", "x"]
    assert parsed("serve", "--model=x", "--port", "1") == ["--port", "1", "x"]
    assert parsed("quantize", "./out", "--model", "x") == ["x", "./out"]
    assert parsed("launch", "-m", "x", "claude") == ["claude", "x"]
    assert parsed("chat", "pocket", "-5 + 3") == ["pocket", "--", "-5 + 3"]
    assert parsed("chat", "--help me", "-x") == ["--extract-code", "--", "--help me"]
    assert parsed("chat", "-sBe terse", "q") == ["-sBe terse", "q"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("chat", "-ngl", "99", "hi"), "--device cpu"),
        (("serve", "--tensor-parallel-size=2"), "CUDA_VISIBLE_DEVICES"),
        (("chat", "-fa", "hi"), "leave it out"),
        (("chat", "--draft-model", "x", "hi"), "--spec draft:MODEL"),
    ],
)
def test_a_flag_without_a_counterpart_says_what_to_do(
    localllm: Run, words: tuple[str, ...], told: str
) -> None:
    outcome = localllm(*words)
    assert outcome.code == ExitCode.USAGE
    assert f"there is no flag {words[1].partition('=')[0]}" in outcome.err
    assert told in outcome.err


def test_flags_without_a_command_are_those_of_chat(localllm: Run) -> None:
    flags = ("-m", "pocket", "-p", "-5 + 3", "-n", "2", "--json")
    assert localllm(*flags).out.startswith('{"model": "pocket"')
    assert localllm("--verbose", *flags).code == 0
    assert "Usage" in localllm("-h").out


def test_what_was_quantized_here_has_its_folder_as_its_name(
    make_checkpoint: Callable[..., Path],
) -> None:
    place = cache_folder("quantized") / "tiny-rtn-g128"
    place.parent.mkdir(parents=True)
    make_checkpoint().rename(place)
    assert resolve_model("tiny-rtn-g128").folder == place
    (cache_folder("quantized") / "other-awq.unfinished").mkdir()
    listed = {model.name: model for model in find_local_models().models}
    assert listed["tiny-rtn-g128"].problem is None
    assert "--resume" in str(listed["other-awq.unfinished"].problem)
    [removal] = plan_removals(["tiny-rtn-g128"])
    assert removal.freed_bytes > 0
    for name in ("../quantized/tiny-rtn-g128", "x\0y"):
        with pytest.raises(CatalogError):
            resolve_model(name)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("llama3.3", "llama-3.1-8b"),
        ("mixtral", "mistral-7b"),
        ("gemma3", ""),
        ("gpt-oss:120b", "gpt-oss-20b"),
        ("phi-3.5", ""),
        ("gemma", ""),
    ],
)
def test_a_lone_word_like_a_model_s_name_is_no_question(
    localllm: Run, word: str, nearest: str
) -> None:
    outcome = localllm("run", word, "-n", "2", stdin=b"")
    assert outcome.code == ExitCode.MODEL
    assert outcome.out == ""
    assert f"unknown model '{word}'" in outcome.err
    assert nearest in outcome.err
    assert f"-p {word}" in outcome.err
    assert localllm("chat", "-p", word, "-n", "2").code == 0
    assert localllm("chat", "-m", "pocket", word, "-n", "2").code == 0


@pytest.mark.parametrize(
    "word",
    [
        "hello", "summarise", "why", "hi there", "42", "2+2", "yes:", "Why?", "gemma 3?",
        "12:30", "re:invent", "note:this",
    ],
)  # fmt: skip
def test_an_ordinary_word_is_a_question(word: str, localllm: Run) -> None:
    assert localllm("chat", word, "-n", "2").code == 0


def test_a_file_is_neither_a_question_nor_a_model(localllm: Run, tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("Buy milk.")
    outcome = localllm("chat", str(notes))
    assert outcome.code == ExitCode.USAGE
    assert f"-f '{notes}'" in outcome.err
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"GGUF")
    outcome = localllm("chat", "m.gguf", "hi")
    assert outcome.code == ExitCode.USAGE
    assert "m.gguf does not exist" in outcome.err
    assert resolve_model(str(weights)).file == weights
    assert is_model_name(str(weights))
    assert is_model_name("m.gguf")
    files, words = split_files(["a.txt"], [str(notes), str(weights), "hi"])
    assert (files, words) == (["a.txt", str(notes)], [str(weights), "hi"])
    outcome = localllm("chat", str(notes), "hi")
    assert outcome.code == ExitCode.USAGE
    assert "is a file" in outcome.err
    (tmp_path / "config.json").write_text("{}")
    outcome = localllm("chat", str(tmp_path / "config.json"), "hi")
    assert outcome.code == ExitCode.USAGE
    assert f"the folder that it is in: {tmp_path}" in outcome.err


def test_a_dash_is_stdin(localllm: Run) -> None:
    plain = localllm("chat", "-n", "2", "--json", stdin=b"What is the KV cache?")
    for words in (("pocket", "-"), ("-f", "-")):
        outcome = localllm("chat", *words, "-n", "2", "--json", stdin=b"What is the KV cache?")
        assert json.loads(outcome.out)["usage"] == json.loads(plain.out)["usage"]


def test_global_options_are_known_behind_the_command(localllm: Run) -> None:
    outcome = localllm("chat", "hi", "--backend", "nope", "--debug")
    assert outcome.code == ExitCode.USAGE
    assert "Traceback" in outcome.err
    assert localllm("help", "plan").out == localllm("plan", "--help").out
    assert localllm("version").out == localllm("--version").out
    assert "try: localllm bench --help" in localllm("bench", "--json").err


def test_groups_alone_list_what_there_is(localllm: Run) -> None:
    for group in ("sessions", "config", "cache"):
        outcome = localllm(group)
        assert outcome.code == 0, group
        assert (outcome.out, outcome.err) == (
            (listed := localllm(group, "list")).out,
            listed.err,
        )
    assert localllm("cache", "ls").out == localllm("cache", "list").out


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temp", "500", "from 0 to 100"),
        ("render", "fancy", "--render must be"),
        ("ctx", "long", "--ctx must be"),
        ("cache-disk", "10q", "--cache-disk must be"),
        ("reserve", "2", "2 needs a unit"),
        ("think", "hard", "--think must be"),
        ("overflow", "crash", "--overflow must be"),
        ("spec", "x", "spec"),
        ("spec-ngram", "8", "--spec-ngram must be"),
        ("dtype", "int4", "dtype must be"),
        ("default_model", "nosuch", "unknown model"),
    ],
)
def test_a_setting_is_refused_when_it_is_set(
    localllm: Run, name: str, value: str, message: str
) -> None:
    outcome = localllm("config", "set", name, value)
    assert outcome.code != 0
    assert message in outcome.err
    assert "nothing is set" in localllm("config", "list").err


def test_a_setting_has_all_names_of_its_flag(localllm: Run) -> None:
    assert localllm("config", "set", "temperature", "0.2").code == 0
    assert localllm("config", "set", "model", "pocket").code == 0
    assert localllm("config").out == "temp = 0.2\ndefault_model = pocket\n"
    outcome = localllm("config", "unset", "temperature")
    assert outcome.code == 0
    assert "temp is no longer set" in outcome.err
    assert localllm("config", "get").out == "default_model = pocket\n"


def test_sessions_are_searched_renamed_exported_and_brought_back(
    localllm: Run, tmp_path: Path
) -> None:
    store = SessionStore(sessions_file())
    store.create(Transcript("pocket", "Be brief.", [Turn("Why?", "pocket", "Because.")]))
    store.create(Transcript("pocket", None, [Turn("How?", "pocket", "So.")]))
    store.close()
    assert "How?" not in localllm("sessions", "list", "WHY").out
    assert "none of the 2" in localllm("sessions", "list", "where").err
    assert localllm("sessions", "rename", "1", "my reasons").code == 0
    assert "my reasons" in localllm("sessions", "ls").out
    assert localllm("sessions", "export", "my reasons").out.startswith("# Conversation")
    file = tmp_path / "chat.json"
    assert localllm("sessions", "export", "1", str(file)).code == 0
    outcome = localllm("sessions", "import", str(file))
    assert outcome.code == 0
    assert "session 3" in outcome.err
    assert localllm("sessions", "show", "3").out == localllm("sessions", "show", "1").out
    file.write_text("{}")
    assert localllm("sessions", "import", str(file)).code == ExitCode.USAGE
    assert localllm("sessions", "delete", "3", "--yes").code == 0
    for name in ("77", "-x", "", "  "):
        outcome = localllm("sessions", "rename", "--", "1", name)
        assert outcome.code == ExitCode.USAGE
        assert "is not a valid session name" in outcome.err


def test_a_new_session_is_told_and_a_number_is_none(localllm: Run) -> None:
    outcome = localllm("chat", "hi", "-n", "2", "--session", "fresh")
    assert "new conversation 'fresh'" in outcome.err
    assert "new conversation" not in localllm("chat", "hi", "-n", "2", "--session", "fresh").err
    outcome = localllm("chat", "hi", "--session", "77")
    assert outcome.code == ExitCode.USAGE
    assert "there is no session 77" in outcome.err


def test_a_plan_that_fails_never_advises_the_same_model(localllm: Run) -> None:
    for words, remedy in (
        (("--weights", "bf16", "--ctx", "32k"), "--weights int4 --ctx "),
        (("--ctx", "32k"), "--ctx "),
        (("--weights", "int8", "--ctx", "1k"), "--weights int4"),
    ):
        outcome = localllm("plan", "llama-3.1-8b", "--gpu", "rtx-4060", *words)
        assert outcome.code == ExitCode.MEMORY
        assert f"try: {remedy}" in outcome.out
        assert "predicted" not in outcome.out
    assert (
        "the model fits, but a context of 131,072"
        in localllm("plan", "llama-3.1-8b", "--gpu", "rtx-4060", "--ctx", "128k").out
    )
    assert "8 needs a unit" in localllm("plan", "qwen3-8b", "--vram", "8").err


def test_the_catalogue_is_not_recited(localllm: Run) -> None:
    outcome = localllm("chat", "zzzzzz", "hi")
    assert outcome.code == ExitCode.MODEL
    assert "localllm plan lists the known ones" in outcome.err
    entries: dict[str, CatalogEntry] = load_catalog()
    assert sum(alias in outcome.err for alias in entries) == 0


def test_a_command_that_nobody_knows_names_what_was_meant(open_window: Open) -> None:
    window = open_window("One.", rows=50)
    for typed, told in (
        ("/regenerat", "try: /regen"),
        ("/temp 0.2", "try: /set temp 0.2"),
        ("/temperature 0.2", "try: /set temp 0.2"),
        ("/zzz", "/help lists all commands"),
    ):
        window.say(typed)
        window.wait_for(told)
    window.say("/regenerate")
    window.wait_for("there is no answer yet")
    window.say("quit")
    assert window.exit_code() == 0


def test_quotes_hold_a_message_of_several_lines(open_window: Open, tmp_path: Path) -> None:
    window = open_window("Read.", rows=30)
    window.say('"""first')
    window.settle()
    window.say("second")
    window.settle()
    assert "Read." not in window.text
    window.say('third"""')
    window.wait_for(r"Read\.")
    file = tmp_path / "chat.json"
    window.say(f"/export {file}")
    window.wait_for(r"wrote \d+ messages")
    window.settle()
    question = json.loads(file.read_text())["messages"][0]["content"]
    assert question == "first\nsecond\nthird"


def test_an_edit_can_be_left_and_no_command_becomes_a_question(open_window: Open) -> None:
    window = open_window("One.", "Two.", rows=50)
    window.say("What is a token?")
    window.wait_for(r"One\.")
    window.settle()
    for keys in ("\x03", "\x15\x04"):  # Ctrl-C; the line deleted, and Ctrl-D
        window.say("/edit")
        window.wait_for(r"edit> What is a token\?")
        window.settle()
        window.send(keys)
        window.wait_for("nothing was changed")
        window.settle()
        window.say("/stats off")
        window.wait_for("statistics under each answer are off")
        window.settle()
    window.say("/edit")
    window.settle()
    window.send("\x15/stats\r")
    window.wait_for("that looks like a command")
    window.say("/edit")
    window.settle()
    window.say(" Really?")
    window.wait_for(r"Two\.")


def test_a_file_that_never_fits_is_not_taken_and_others_can_be_put_away(
    open_window: Open, tmp_path: Path
) -> None:
    window = open_window("One.", rows=50, columns=160, flags=("--ctx", "300"))
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("word " * 500)
    short.write_text("milk")
    window.say(f"/file {long}")
    window.wait_for(
        r"long\.txt is too long: it has at least 2,\d\d\d tokens, and the context holds 300"
    )
    window.say(f"/file {short}")
    window.wait_for(r"will\s+be\s+sent\s+with\s+the\s+next\s+message")
    window.say("/file")
    window.wait_for(r"with the next message: .*short\.txt")
    window.say("/file off")
    window.wait_for("no file will be sent with")
    window.say("hello")
    window.wait_for(r"One\.")


def test_what_was_stopped_before_the_answer_is_kept_and_asked_again(open_window: Open) -> None:
    window = open_window("One.", rows=50, step_ms=20, prefill_steps=200)
    window.say("hello")
    window.wait_for("reading ")
    window.send("\x03")
    window.wait_for("interrupted before the answer; /retry asks again")
    assert "0 tok/s" not in window.text
    window.say("/sessions")
    window.wait_for(r"1 turn +just now +hello")
    window.say("/undo")
    window.wait_for("removed: hello")
    window.say("/undo")
    window.wait_for("nothing to undo")


def test_a_conversation_says_how_to_go_on_and_shows_where_it_stood(
    open_window: Open, tmp_path: Path
) -> None:
    window = open_window("It is blue.", rows=40)
    window.say("What colour?")
    window.wait_for(r"It is blue\.")
    window.settle()
    file = tmp_path / "chat.json"
    window.say(f"/export {file}")
    window.wait_for(r"wrote \d+ messages")
    window.say("/save the sky")
    window.wait_for(r"--session 'the sky'\s+continues it")
    window.say("/clear")
    window.wait_for("a new conversation")
    window.say("/load nothing.json")
    window.wait_for("/sessions lists them")
    window.say(f"/load {file}")
    window.wait_for(r"> What colour\?\n +It is blue\.")
    window.say("/exit")
    window.wait_for("saved as session 2; localllm chat --continue resumes it")
    assert window.exit_code() == 0
