"""Bad input through the command: its exit code, and a message that names the cause.

The rows not here: downloads in tests/hub/test_download.py, templates and headers in full in
tests/text/test_template.py and tests/model/test_weights.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from localllm.errors import ExitCode

Make = Callable[..., Path]
Run = Callable[..., Any]


def assert_refused(outcome: Any, code: ExitCode, *words: str) -> None:
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("error: ") or "\nerror: " in outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def test_unknown_model(localllm: Run) -> None:
    outcome = localllm("chat", "qwen3-9b", "hi")
    assert_refused(outcome, ExitCode.MODEL, "'qwen3-9b'", "qwen3-8b", "try:")


def test_truncated_weights(make_checkpoint: Make, localllm: Run) -> None:
    folder = make_checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    outcome = localllm("chat", str(folder), "hi")
    assert_refused(outcome, ExitCode.CHECKPOINT, "model.safetensors", "tensor")


def test_shape_that_contradicts_the_config(make_checkpoint: Make, localllm: Run) -> None:
    folder = make_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    outcome = localllm("chat", str(folder), "hi")
    assert_refused(outcome, ExitCode.CHECKPOINT, name, "[31, 48]", "[32, 48]")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": 1,\n  "b": }', "line 2, column 8"),
        ("[]", "must hold an object"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "cannot be read"),
        (" " * 10_000_001, "too large"),
        ("\xff\xfe", "not UTF-8"),
        ("{}", "'architectures'"),
    ],
)
def test_broken_config(make_checkpoint: Make, localllm: Run, text: str, word: str) -> None:
    folder = make_checkpoint()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "config.json", word)


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 0), ("vocab_size", -5), ("rope_theta", "NaN")]
)
def test_absurd_config_values(
    make_checkpoint: Make, edit_json: Any, localllm: Run, field: str, value: Any
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", **{field: value})
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, field)


def test_repository_code_never_runs(make_checkpoint: Make, edit_json: Any, localllm: Run) -> None:
    folder = make_checkpoint()
    tripwire = folder / "ran"
    (folder / "modeling_x.py").write_text(f"open({str(tripwire)!r}, 'w')")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    outcome = localllm("chat", str(folder), "hi", "-n", "2")
    assert outcome.code == ExitCode.OK
    assert "code in the model's folder is not run" in outcome.err
    edit_json(folder / "config.json", architectures=["XForCausalLM"])
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "XForCausalLM")
    assert not tripwire.exists()


def test_pickled_weights(make_checkpoint: Make, localllm: Run) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "model.pt")
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "pickle", "convert")


def test_unsupported_architecture_and_quantization(
    make_checkpoint: Make, edit_json: Any, localllm: Run
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", quantization_config={"quant_method": "hqq"})
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "hqq", "vLLM")
    edit_json(folder / "config.json", architectures=["Gemma9ForCausalLM"])
    outcome = localllm("chat", str(folder), "hi")
    assert_refused(outcome, ExitCode.CHECKPOINT, "Gemma9ForCausalLM", "docs/models.md", "vLLM")


def test_a_folder_without_a_tokenizer(make_checkpoint: Make, localllm: Run) -> None:
    folder = make_checkpoint()
    (folder / "tokenizer.json").unlink()
    outcome = localllm("chat", str(folder), "hi")
    assert_refused(outcome, ExitCode.CHECKPOINT, "tokenizer.json is missing")


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% if %}", "broken"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ ''.__class__.__mro__ }}", "escape"),
        # By its own clock of processor time, or by the asking process's on a busy machine.
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "stopped",
        ),
        ("{{ 'x' * 999999999 }}", "stopped"),
    ],
)
def test_hostile_template(make_checkpoint: Make, localllm: Run, template: str, word: str) -> None:
    folder = make_checkpoint()
    (folder / "chat_template.jinja").write_text(template)
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "template", word)
    assert localllm("chat", str(folder), "hi", "--raw", "-n", "2").code == ExitCode.OK


def test_base_model_without_template_completes(
    make_checkpoint: Make, edit_json: Any, localllm: Run
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    outcome = localllm("chat", str(folder), "hello", "--json", "-n", "2")
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 5
    assert "has no chat template: it continues the text" in outcome.err
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "<|im_start|>hello"}))
    outcome = localllm("chat", str(folder), "hello", "--json", "-n", "2")
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 6
    assert "chat template" not in outcome.err


@pytest.mark.parametrize("name", ["../../no-such", "/nonexistent/model", "a\0b", "x/../../y"])
def test_path_tricks_in_the_model_s_name(localllm: Run, name: str) -> None:
    assert_refused(localllm("chat", name, "hi"), ExitCode.USAGE)


def test_path_tricks_in_the_index(make_checkpoint: Make, localllm: Run) -> None:
    folder = make_checkpoint()
    index = {"weight_map": {"lm_head.weight": "../../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(localllm("chat", str(folder), "hi"), ExitCode.CHECKPOINT, "outside")


def test_prompt_longer_than_the_context(make_checkpoint: Make, localllm: Run) -> None:
    folder = str(make_checkpoint())
    outcome = localllm("chat", folder, "x" * 600, "--raw")
    assert_refused(outcome, ExitCode.CONTEXT, "600 tokens", "512")
    outcome = localllm("chat", folder, "x" * 512, "--raw")
    assert_refused(outcome, ExitCode.CONTEXT, "512")
    assert localllm("chat", folder, "x" * 511, "--raw").code == ExitCode.OK
    assert localllm("chat", folder, "x" * 100, "--raw", "--ctx", "64").code == ExitCode.CONTEXT


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--temp", "-1"), "temperature"),
        (("--temp", "nan"), "temperature"),
        (("--top-p", "7"), "top_p"),
        (("-n", "0"), "max_tokens"),
        (("--logprobs", "99", "--json"), "logprobs"),
        (("--seed", str(1 << 80)), "seed"),
        (("--stop", ""), "stop"),
        (("--stop", "x" * 300), "stop"),
        (("--logit-bias", "1=nan"), "logit_bias"),
        (("--logit-bias", "-4=1"), "logit_bias"),
        (("--logit-bias", "x=1"), "--logit-bias"),
        (("--logit-bias", "1=1000"), "logit_bias"),
        (("--temp", "warm"), "--temp"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--dtype", "int3"), "dtype"),
        (("--ctx", "-5"), "--ctx"),
    ],
)
def test_parameters_out_of_range(
    make_checkpoint: Make, localllm: Run, flags: tuple[str, ...], word: str
) -> None:
    assert_refused(localllm("chat", str(make_checkpoint()), "hi", *flags), ExitCode.USAGE, word)


def test_token_ids_out_of_range(make_checkpoint: Make, localllm: Run) -> None:
    folder = str(make_checkpoint())
    for entry in ("288=1", f"{10**18}=1"):
        outcome = localllm("chat", folder, "hi", "--logit-bias", entry)
        assert_refused(outcome, ExitCode.USAGE, "logit_bias")


def test_empty_prompt(make_checkpoint: Make, localllm: Run) -> None:
    folder = str(make_checkpoint())
    assert_refused(localllm("chat", folder), ExitCode.USAGE, "no prompt")
    assert_refused(localllm("chat", folder, "", stdin=b" \n"), ExitCode.USAGE, "no prompt")


def prompt_tokens(outcome: Any) -> int:
    assert outcome.code == ExitCode.OK, outcome.err
    return int(json.loads(outcome.out)["usage"]["prompt_tokens"])


def test_odd_bytes_on_stdin(make_checkpoint: Make, localllm: Run) -> None:
    model = str(make_checkpoint())
    flags = ("chat", model, "--raw", "--json", "-n", "1")
    assert prompt_tokens(localllm(*flags, stdin=b"\xef\xbb\xbfabc")) == 6  # as it is
    assert prompt_tokens(localllm(*flags, stdin=b"a\r\nb\r\n")) == 6
    said = [
        prompt_tokens(localllm("chat", model, "--json", "-n", "1", stdin=text))
        for text in (b"a\nb", b"\xef\xbb\xbfa\r\nb\r\n")  # mark stripped, line ends normalised
    ]
    assert said[0] == said[1]
    assert prompt_tokens(localllm(*flags, stdin=b"a\0b")) == 3  # NUL kept
    bad = localllm(*flags, stdin=b"words \xff and more words")
    assert prompt_tokens(bad) == len("words \ufffd and more words".encode())
    assert bad.err.count("warning: stdin is not valid UTF-8") == 1


def test_binary_and_endless_stdin(make_checkpoint: Make, localllm: Run) -> None:
    folder = str(make_checkpoint())
    picture = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
    assert_refused(localllm("chat", folder, stdin=picture), ExitCode.USAGE, "looks binary")
    outcome = localllm("chat", folder, stdin=b"word " * 21_000_000)
    assert_refused(outcome, ExitCode.CONTEXT, "64 MiB")
    outcome = localllm("chat", folder, stdin=b"word " * 2_000_000)
    assert_refused(outcome, ExitCode.CONTEXT, "512")


def test_files_that_cannot_be_read(make_checkpoint: Make, localllm: Run, tmp_path: Path) -> None:
    folder = str(make_checkpoint())
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, reason in ((tmp_path / "missing.txt", "is not a file"), (empty, "no text file")):
        assert_refused(localllm("chat", folder, "-f", str(name)), ExitCode.USAGE, reason)
