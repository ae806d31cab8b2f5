"""Flags as users of other programs type them: each is read as ours, or refused with what to do.

llama.cpp writes flags of several letters behind one dash, which click would take for a short flag
with its value: `-ngl 99` would be `-n gl`.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from localllm.errors import RequestError

# Theirs: ours, with the same meaning.
_SAME = {
    **dict.fromkeys(("--ctx-size", "--num-ctx", "--n-ctx", "--context-length"), "--ctx"),
    **dict.fromkeys(("--max-context-length", "--max-seq-len", "--max-kv-size"), "--ctx"),
    **dict.fromkeys(("--n-predict", "--predict", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("--max-new-tokens", "--max-completion-tokens"), "--max-tokens"),
    **dict.fromkeys(("-m", "--model", "-hf", "--hf-repo", "--model-path"), "--model"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-sysf", "--system-prompt-file"), "--system-file"),
    **dict.fromkeys(("--repetition-penalty",), "--repeat-penalty"),
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop"),
    **dict.fromkeys(("-t",), "--threads"),
    **dict.fromkeys(("-np", "--parallel", "--max-batch-size"), "--max-num-seqs"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "--kv-cache-type"), "--kv-cache-dtype"),
    **dict.fromkeys(("--grammar-file",), "--grammar"),
    **dict.fromkeys(("-j", "-jf", "--json-schema-file", "--schema"), "--json-schema"),
    **dict.fromkeys(("-x", "--extract"), "--extract-code"),
    **dict.fromkeys(("--hidethinking",), "--hide-thinking"),
    **dict.fromkeys(("-no-cnv", "--no-conversation", "--ignore-chat-template"), "--raw"),
    **dict.fromkeys(("--draft-max", "--num-draft-tokens", "--draft"), "--spec-max"),
    **dict.fromkeys(("--key",), "--api-key"),
    **dict.fromkeys(("--url", "--base-url", "--api-base"), "--remote"),
    **dict.fromkeys(("--keep-alive",), "--keepalive"),
    **dict.fromkeys(("--no-log",), "--no-save"),
    **dict.fromkeys(("--prompt-file", "--fragment"), "--file"),
}
# Theirs: our argument, where a command has one of this name and no such flag.
_ARGUMENTS = {
    **dict.fromkeys(("-m", "--model", "-hf", "--hf-repo", "--model-path"), "model"),
    **dict.fromkeys(("-o", "--out", "--output", "--outdir", "--out-dir", "--output-dir"), "out"),
}
_GPU = ("the model is on the GPU if there is one", "leave it out; --device cpu uses none")
_ONE_GPU = ("localllm uses one GPU", "CUDA_VISIBLE_DEVICES=1 chooses it")
_ALWAYS = ("localllm does this by itself", "leave it out")
_BATCH = ("this is the number of tokens in a step", "--max-num-batched-tokens N")
_DRAFT = ("a draft model is a way to draft tokens", "--spec draft:MODEL")
_KIND = ("the type is read from the model's files", "localllm quantize MODEL makes a smaller copy")
_CODE = ("localllm runs no code of a repository", "leave it out")
_TEMPLATE = ("the template is part of the model", "chat_template.jinja in the model's folder")
_NONE = ("localllm cannot do this", "leave it out")
# Theirs: why there is no such flag here, and what to do.
_OTHERS = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"), _GPU),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe"), (_GPU[0], "--expert-memory")),
    **dict.fromkeys(("-ot", "--override-tensor", "--cpu-offload-gb"), (_GPU[0], "--expert-memory")),
    **dict.fromkeys(
        ("-mg", "--main-gpu", "-ts", "--tensor-split", "-sm", "--split-mode"), _ONE_GPU
    ),
    **dict.fromkeys(("-tp", "--tensor-parallel-size", "--pipeline-parallel-size"), _ONE_GPU),
    **dict.fromkeys(("-fa", "--flash-attn", "--enable-chunked-prefill", "--mlock"), _ALWAYS),
    **dict.fromkeys(("--enable-prefix-caching", "--no-mmap", "--jinja", "--stream"), _ALWAYS),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive", "-st"), _ALWAYS),
    **dict.fromkeys(("--single-turn", "--no-display-prompt", "--enforce-eager"), _ALWAYS),
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser"), _ALWAYS),
    **dict.fromkeys(("--reasoning-parser", "--reasoning-format", "--no-warmup"), _ALWAYS),
    **dict.fromkeys(
        ("--no-stream",), ("an answer is printed as it comes", "--json prints it whole")
    ),
    **dict.fromkeys(("--nowordwrap",), ("a pipe gets the text as it is", "--render plain")),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _BATCH),
    **dict.fromkeys(("-md", "--model-draft", "--draft-model", "--speculative-model"), _DRAFT),
    **dict.fromkeys(("--quantization", "-ctv", "--cache-type-v", "--load-format"), _KIND),
    **dict.fromkeys(("--trust-remote-code",), _CODE),
    **dict.fromkeys(("--chat-template", "--chat-template-file"), _TEMPLATE),
    **dict.fromkeys(("--lora", "--adapter-path", "--enable-lora", "--image", "--mmproj"), _NONE),
    **dict.fromkeys(("--mirostat", "--typical", "--xtc-probability", "--dry-multiplier"), _NONE),
    **dict.fromkeys(
        ("-hff", "--hf-file", "-mu", "--model-url"),
        ("a model is a whole repository", "-m org/name"),
    ),
    **dict.fromkeys(
        ("-o", "--option"), ("each option has a flag of its own", "--temp 0.7, --top-p 0.9")
    ),
    **dict.fromkeys(
        ("--download-dir", "--cache-folder"), ("downloads are in the hub's cache", "HF_HOME=FOLDER")
    ),
    **dict.fromkeys(
        ("--hf-token", "-hft"), ("the hub's own variable holds the token", "HF_TOKEN=...")
    ),
}
# A prompt that begins with a dash: -5 + 3, a list in markdown, "--help me".
_PROMPT = re.compile(r"-[^A-Za-z-]|--[^A-Za-z]|-[A-Za-z]\s|--[\w-]+\s", re.ASCII)


def translated(words: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """The words of a command line with other programs' flags as ours, and prompts that begin with a
    dash behind `--`.

    Raises: RequestError for a flag that has no counterpart.
    """
    options = _options(parameters)
    arguments = [each.name for each in parameters if each.param_type_name == "argument"]
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    prompts: list[str] = []
    named: dict[str, str] = {}  # arguments that were given as flags
    places: list[int] = []  # of arguments among what was found
    rest = iter(words[:end])
    for word in rest:
        name, is_given, value = word.partition("=")
        meant = _ARGUMENTS.get(name.replace("_", "-"), "")
        if meant in arguments and not options.keys() & {name, f"--{meant}"}:
            named[meant] = value if is_given else next(rest, "")
            continue
        ours = _ours(name, options)
        if _PROMPT.match(word) and name not in options:
            prompts.append(word)
        elif ours is not None:
            found.append(word if ours == name else f"{ours}={value}" if is_given else ours)
            if options.get(ours, False) and not is_given:
                found.extend(islice(rest, 1))  # its value, whatever that looks like
        else:
            places += [len(found)] * (not word.startswith("-"))
            found.append(word)
    for i, argument in enumerate(arguments):
        if argument in named:
            place = places[i] if i < len(places) else len(found)
            found.insert(place, named[argument])
            places[i:] = [place, *(each + 1 for each in places[i:])]
    behind = [*prompts, *words[end + 1 :]]
    return [*found, *(["--", *behind] if behind or end < len(words) else [])]


def _options(parameters: Sequence[Any]) -> dict[str, bool]:
    """The names of flags, and whether each takes a value."""
    return {
        name: not (each.is_flag or each.count)
        for each in parameters
        if each.param_type_name == "option"
        for name in (*each.opts, *each.secondary_opts)
    }


def _ours(name: str, options: dict[str, bool]) -> str | None:
    """The flag that `name` stands for; None for a word that is no flag, or that click may judge.

    Raises: RequestError.
    """
    if not name.startswith("-") or len(name) < 2:
        return None
    if name in options:
        return name
    spelt = name.replace("_", "-")
    doubled = f"-{spelt}" if not spelt.startswith("--") and len(spelt) > 2 else spelt
    for each in (spelt, doubled):
        same = _SAME.get(each)
        if each in options:
            return each
        if same in options:
            return same
        if each in _OTHERS:
            why, hint = _OTHERS[each]
            raise RequestError(f"there is no flag {name}", param=name, where=why, hint=hint)
    return None
