"""Settings: what holds where neither a flag nor a variable says otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ExitCode
from localllm.hub.catalog import load_catalog
from localllm.user.places import config_file, user_catalog

Run = Callable[..., Any]


def test_a_setting_is_the_default_of_its_flag(localllm: Run) -> None:
    assert localllm("config", "set", "max-tokens", "3").code == 0
    assert localllm("config", "get", "max_tokens").out == "3\n"
    short = localllm("chat", "What is the KV cache?", "--json").out
    assert '"completion_tokens": 3' in short
    longer = localllm("chat", "What is the KV cache?", "--json", "-n", "5").out
    assert '"completion_tokens": 5' in longer
    aside = localllm("--no-config", "chat", "What is the KV cache?", "--json").out
    assert '"finish_reason": "stop"' in aside
    assert localllm("config", "unset", "max-tokens").code == 0
    assert localllm("config", "get", "max-tokens").code == ExitCode.USAGE


def test_a_linked_file_of_settings_stays_linked(localllm: Run, tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles" / "localllm.toml"
    kept.parent.mkdir()
    kept.write_text("temp = 0.5\n")
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().symlink_to(kept)
    assert localllm("config", "set", "max-tokens", "3").code == 0
    assert config_file().is_symlink()
    assert "max_tokens = 3" in kept.read_text()
    assert "temp = 0.5" in kept.read_text()


def test_a_variable_is_over_a_setting(localllm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    localllm("config", "set", "max-tokens", "3")
    monkeypatch.setenv("LOCALLLM_MAX_TOKENS", "4")
    assert '"completion_tokens": 4' in localllm("chat", "What is the KV cache?", "--json").out


def test_the_default_model_is_a_setting(
    localllm: Run, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint()
    localllm("config", "set", "default_model", str(folder))
    assert str(folder) in localllm("chat", "hi", "-n", "2", "--json").out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("default_model", "./m"),
        ("default_model", "m/"),
        ("spec", "draft:./m"),
        ("cache-dir", "m"),
        ("system-file", "m/config.json"),
        ("json-schema", "m/config.json"),
    ],
)
def test_a_setting_means_the_same_file_in_every_folder(
    localllm: Run,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    (tmp_path / "m").symlink_to(make_checkpoint())
    monkeypatch.chdir(tmp_path)
    assert localllm("config", "set", name, value).code == 0
    whole = tmp_path / value.removeprefix("draft:")
    found = localllm("config", "get", name).out.strip()
    assert found == ("draft:" if value.startswith("draft:") else "") + str(whole)


def test_names_of_models_stay_names(localllm: Run) -> None:
    for name in ("pocket", "qwen3-0.6b", "org/name"):
        localllm("config", "set", "default_model", name)
        assert localllm("config", "get", "default_model").out == f"{name}\n"


def test_a_value_of_the_wrong_kind_or_name_is_refused(localllm: Run) -> None:
    for arguments, text in (
        (("temp", "warm"), "temp"),
        (("max-tokens", "1.5"), "max_tokens"),
        (("tempp", "1"), "nearest: temp"),
        (("color", "green"), "--color must be auto, always or never"),
        (("keepalive", "5x"), "--keepalive must be like 5m"),
        (("threads", "0"), "threads"),
        (("spec", "draft:nope"), "unknown model 'nope'"),
        (("spec", "auto+eagle:nope"), "unknown model 'nope'"),
        (("spec", "head+eagle:nope"), "--spec takes head or eagle:HEAD, not both"),
    ):
        outcome = localllm("config", "set", *arguments)
        assert outcome.code in (ExitCode.USAGE, ExitCode.MODEL)
        assert text in outcome.err
    assert not config_file().exists()


def test_an_error_tells_where_a_value_comes_from(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text('temp = "hot"\n')
    assert f"set in {config_file()}" in localllm("chat", "hi").err
    # A value that the flag takes and the command refuses.
    monkeypatch.delenv("LOCALLLM_KEEPALIVE")
    config_file().write_text('keepalive = "5x"\n')
    assert f"set in {config_file()}" in localllm("chat", "hi").err
    monkeypatch.setenv("LOCALLLM_THREADS", "0")
    assert "set by the variable LOCALLLM_THREADS" in localllm("bench", "pocket").err
    monkeypatch.setenv("LOCALLLM_TEMP", "warm")
    assert "set by the variable LOCALLLM_TEMP" in localllm("chat", "hi").err
    outcome = localllm("chat", "hi", "--temp", "x")
    assert outcome.code == ExitCode.USAGE
    assert "set by" not in outcome.err


def test_comments_survive_a_change(localllm: Run) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text("# mine\ntemp = 0.5  # not too hot\n")
    localllm("config", "set", "seed", "7")
    assert config_file().read_text() == "# mine\ntemp = 0.5  # not too hot\nseed = 7\n"


def test_a_broken_file_is_told_with_its_line_and_can_be_left_aside(localllm: Run) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text("temp = 0.5\nseed = = 7\n")
    outcome = localllm("chat", "hi")
    assert outcome.code == ExitCode.USAGE
    assert "line 2" in outcome.err
    assert "--no-config" in outcome.err
    assert localllm("--no-config", "chat", "What is the KV cache?").code == 0
    config_file().write_text("tmp = 0.5\n")
    outcome = localllm("ls")
    assert outcome.code == ExitCode.USAGE
    assert "did you mean 'temp'?" in outcome.err


MINE = "[mine]\nrepo = 'me/mine'\nlicence = 'mit'\narchitecture = 'LlamaForCausalLM'\n"


def test_models_of_the_users_own_add_to_the_catalogue(localllm: Run) -> None:
    path = Path(localllm("config", "path", "--catalog").out.strip())
    assert path == user_catalog()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE + MINE.replace("[mine]", "['qwen3-8b']"))
    catalog = load_catalog()
    assert catalog["mine"].repo == catalog["qwen3-8b"].repo == "me/mine"
    assert catalog["qwen3-4b"].repo == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MINE + "colour = 'red'\n", "line 5"),
        (MINE.replace("licence", "lisence"), "did you mean 'licence'?"),
        (MINE + MINE, "twice"),
        (MINE + "gated = 1\n", "gated must be true or false"),
        (MINE + "thinking = 'deep'\n", "line 5"),
        ("[mine\n", "line 1"),
        ("x = 1\n", "must be a table"),
    ],
)
def test_a_broken_catalogue_of_the_users_own_is_told_with_its_line(
    localllm: Run, text: str, told: str
) -> None:
    user_catalog().parent.mkdir(parents=True, exist_ok=True)
    user_catalog().write_text(text)
    outcome = localllm("chat", "qwen3-8b", "hi")
    assert outcome.code == ExitCode.USAGE
    assert told in outcome.err
    assert "--no-config" in outcome.err
    assert localllm("--no-config", "chat", "What is the KV cache?").code == 0


def test_a_catalogue_that_is_no_text_is_told(localllm: Run) -> None:
    user_catalog().parent.mkdir(parents=True, exist_ok=True)
    user_catalog().write_bytes(MINE.encode() + b"# caf\xe9\n")
    outcome = localllm("show", "qwen3-8b")
    assert outcome.code == ExitCode.USAGE
    assert "line 5" in outcome.err


def test_a_setting_gives_way_to_a_flag_that_excludes_it(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    localllm("config", "set", "format", "json")
    localllm("config", "set", "temp", "0.7")
    assert localllm("chat", "hi", "--regex", "yes|no").out.strip() in ("yes", "no")
    assert localllm("chat", "hi", "-n", "2", "--greedy").code != ExitCode.USAGE
    monkeypatch.setenv("LOCALLLM_REGEX", "[0-9]{2}")
    assert localllm("chat", "hi", "--json-schema", '{"const": 1}').out.strip() == "1"
    both = localllm("chat", "hi", "--regex", "a", "--format", "json")
    assert both.code == ExitCode.USAGE
    assert "cannot be combined" in both.err


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temp", "hot", "temp must be a number, found 'hot'"),
        ("seed", "1.5", "seed must be a whole number, found '1.5'"),
        ("greedy", "maybe", "greedy must be true or false, found 'maybe'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_plainly(
    localllm: Run, name: str, value: str, wanted: str
) -> None:
    outcome = localllm("config", "set", name, value)
    assert outcome.code == ExitCode.USAGE
    assert wanted in outcome.err
