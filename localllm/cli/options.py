"""Flags that several commands share, and what they are turned into."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from localllm.answer.overflow import OVERFLOW_POLICIES, OverflowPolicy
from localllm.cli.flags import option
from localllm.cli.user_input import read_file
from localllm.engine.config import KV_CACHE_DTYPES, EngineConfig
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import RequestError
from localllm.text.grammar import Grammar
from localllm.text.prompt import THINK_LEVELS, ThinkLevel

_SPECULATION = SpeculationConfig()
SPEC, SPEC_MAX = _SPECULATION.drafter, _SPECULATION.max_draft
SPEC_NGRAM = f"{_SPECULATION.min_match}:{_SPECULATION.max_match}"
# What weights can be drawn or planned in; those of `random_weights`, whose module needs torch.
WEIGHT_KINDS = ("bf16", "int8", "int4", "fp8")


Temperature = Annotated[
    float | None, option("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
]
TopK = Annotated[int | None, option("--top-k", help="Keep the K likeliest tokens; 0: all.")]
TopP = Annotated[float | None, option("--top-p", help="Keep the likeliest tokens up to P.")]
MinP = Annotated[
    float | None, option("--min-p", help="Drop tokens under P times the likeliest one's.")
]
RepeatPenalty = Annotated[
    float | None, option("--repeat-penalty", help="Divide logits of tokens that occurred; 1: off.")
]
PresencePenalty = Annotated[
    float | None, option("--presence-penalty", help="Subtract from tokens already generated.")
]
FrequencyPenalty = Annotated[
    float | None, option("--frequency-penalty", help="Subtract for each time it was generated.")
]
LogitBias = Annotated[
    list[str] | None,
    option("--logit-bias", help="Add BIAS to a token's logit; repeatable.", metavar="ID=BIAS"),
]
Seed = Annotated[int | None, option("--seed", help="Same seed, same text.")]
Stop = Annotated[list[str] | None, option("--stop", help="End before this text; repeatable.")]
IgnoreEos = Annotated[bool, option("--ignore-eos", help="Go on after the model's end token.")]
MaxTokens = Annotated[int | None, option("-n", "--max-tokens", help="Longest answer, in tokens.")]
Logprobs = Annotated[
    int | None, option("--logprobs", help="With --json: log-probabilities, and the N likeliest.")
]
Greedy = Annotated[bool, option("--greedy", help="Temperature 0.")]

Format = Annotated[
    str | None,
    option("--format", help="The answer is a JSON object.", choices=("json",)),
]
JsonSchema = Annotated[
    str | None,
    option("--json-schema", help="The answer is JSON of the schema in FILE.", metavar="FILE"),
]
Regex = Annotated[
    str | None, option("--regex", help="The answer matches an expression.", metavar="RE")
]
GrammarFile = Annotated[
    Path | None, option("--grammar", help="The answer follows the Lark grammar in FILE.")
]
Keepalive = Annotated[
    str | None,
    option(
        "--keepalive",
        help="Leave the engine running for the next question: 5m, 0 (no), -1 (for ever).",
        metavar="TIME",
    ),
]
Think = Annotated[
    str | None,
    option(
        "--think",
        help="How much the model thinks.",
        choices=THINK_LEVELS,
    ),
]
HideThinking = Annotated[bool, option("--hide-thinking", help="Do not show the model's thoughts.")]
Render = Annotated[
    str,
    option(
        "--render",
        help="On a terminal: as markdown (blocks), or as the text comes.",
        choices=("auto", "blocks", "plain"),
    ),
]
ParseSpecial = Annotated[
    bool, option("--parse-special", help="Text like <|im_end|> in a prompt is a special token.")
]

Context = Annotated[
    str | None,
    option("-c", "--ctx", "--max-model-len", help="Context length: 4096, 32k or auto."),
]
GpuMemoryUtilization = Annotated[
    float, option("--gpu-memory-utilization", help="Share of the free memory to use.")
]
Reserve = Annotated[
    str | None,
    option("--reserve", help="Memory to leave free, as 512MiB or 2GiB.", metavar="SIZE"),
]
Deterministic = Annotated[
    bool, option("--deterministic", help="Same bits in any batch, on a GPU too; slower there.")
]
Spec = Annotated[
    str,
    option("--spec", help="Who drafts tokens.", choices=("auto", "ngram", "draft:MODEL", "off")),
]
SpecMax = Annotated[int, option("--spec-max", help="Tokens of a draft, at most.")]
SpecNgram = Annotated[
    str, option("--spec-ngram", help="Tokens to match for an n-gram draft.", metavar="MIN:MAX")
]
MaxNumSeqs = Annotated[int | None, option("--max-num-seqs", help="Requests in one batch.")]
MaxNumBatchedTokens = Annotated[
    int | None, option("--max-num-batched-tokens", help="Tokens in one step (CPU 256, GPU 2048).")
]
NoPrefixCache = Annotated[bool, option("--no-prefix-cache", help="Share no prompt prefixes.")]
CacheDisk = Annotated[
    str | None,
    option(
        "--cache-disk",
        help="Keep prompts' keys and values on disk, at most SIZE of them.",
        metavar="SIZE",
    ),
]
CacheDir = Annotated[str | None, option("--cache-dir", help="Keep them in DIR.", metavar="DIR")]
Backend = Annotated[
    str,
    option("--backend", help="Whose operators compute.", choices=("auto", "torch", "triton")),
]
Device = Annotated[str, option("--device", help="What computes.", choices=("auto", "cuda", "cpu"))]
SelfCheck = Annotated[
    bool,
    option(
        "--self-check/--no-self-check",
        help="Check a GPU's kernels before their first use there.",
    ),
]
Threads = Annotated[
    int | None,
    option("--threads", help="Threads on a CPU; unset: one a core, fewer beside other work."),
]
KVCacheDTypeName = Annotated[
    str,
    option(
        "--kv-cache-dtype",
        help="What keys and values are kept in.",
        choices=KV_CACHE_DTYPES,
    ),
]
DTypeName = Annotated[
    str,
    option(
        "--dtype",
        help="What is computed in.",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The sampling flags as given; None where a flag was not."""

    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: list[str] | None
    seed: int | None
    stop: list[str] | None
    ignore_eos: bool
    max_tokens: int | None
    logprobs: int | None
    greedy: bool

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that were set by a flag. Raises: RequestError."""
        if self.greedy and self.temp:
            raise RequestError("--greedy and --temp exclude each other", param="temperature")
        fields = {
            "temperature": 0.0 if self.greedy else self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": parse_logit_bias(self.logit_bias) if self.logit_bias else None,
            "seed": self.seed,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos or None,
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The engine flags as given."""

    ctx: str | None
    gpu_memory_utilization: float
    reserve: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    no_prefix_cache: bool
    backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    deterministic: bool
    speculation: SpeculationConfig
    cache_disk: str | None = None
    cache_dir: str | None = None
    threads: int | None = None
    self_check: bool = True

    def config(self, default_max_num_seqs: int) -> EngineConfig:
        """The EngineConfig they ask for. Raises: RequestError."""
        return EngineConfig(
            max_model_len=parse_context(self.ctx),
            gpu_memory_utilization=self.gpu_memory_utilization,
            reserve_bytes=0 if self.reserve is None else parse_size(self.reserve, "reserve"),
            deterministic=self.deterministic,
            speculation=self.speculation,
            max_num_seqs=default_max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=not self.no_prefix_cache,
            cache_disk_bytes=parse_size(self.cache_disk, "cache-disk") if self.cache_disk else 0,
            cache_dir=self.cache_dir,
            threads=self.threads,
            self_check=self.self_check,
            backend=cast(Literal["auto"], self.backend),
            device=cast(Literal["auto"], self.device),
            dtype=cast(Literal["auto"], self.dtype),
            kv_cache_dtype=cast(Literal["auto"], self.kv_cache_dtype),
        )


def parse_keepalive(text: str | None) -> float | None:
    """Seconds from `5m`, `90s`, `2h` or a number of seconds; below 0: for ever. Raises:
    RequestError.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(-?[0-9]{1,7}(?:\.[0-9]{1,3})?) ?(s|m|min|h)?", text.strip().lower())
    if found is None:
        raise RequestError(
            f"--keepalive must be like 5m, 90s, 0 or -1, found {text!r:.40}", param="keepalive"
        )
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]


def parse_grammar(
    form: str | None, json_schema: str | None, regex: str | None, grammar: Path | None
) -> Grammar | None:
    """What the answer has to be, by the one of four flags that is given. Raises: RequestError."""
    flags = {"format": form, "json-schema": json_schema, "regex": regex, "grammar": grammar}
    given = [name for name, value in flags.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(f"--{given[0]} and --{given[1]} exclude each other", param=given[1])
    found = Grammar.any_object()
    if json_schema is not None:
        found = _read_schema(json_schema)
    elif regex is not None:
        found = Grammar("regex", regex)
    elif grammar is not None:
        found = Grammar("lark", read_file(grammar))
    elif form != "json":
        raise RequestError(
            f"--format must be json, found {form!r:.40}",
            param="format",
            hint="--json-schema, --regex or --grammar for other forms",
        )
    from localllm.answer.grammar_compiler import check_grammar

    check_grammar(found)
    return found


def _read_schema(given: str) -> Grammar:
    """From a file, or as it stands where it begins like one."""
    text = given if given.lstrip().startswith("{") else read_file(Path(given))
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the JSON schema is no JSON: {error!s:.200}", param="json-schema"
        ) from error
    return Grammar.of_schema(schema, "json-schema")


def parse_overflow(text: str) -> OverflowPolicy:
    """`text` as a policy. Raises: RequestError."""
    for policy in OVERFLOW_POLICIES:
        if text == policy:
            return policy
    raise RequestError(
        f"--overflow must be {' or '.join(OVERFLOW_POLICIES)}, found {text!r:.40}", param="overflow"
    )


def parse_think(text: str | None) -> ThinkLevel | None:
    """`--think`'s word. Raises: RequestError."""
    if text is None or text in THINK_LEVELS:
        return text
    raise RequestError(
        f"--think must be {', '.join(THINK_LEVELS)}, found {text!r:.40}", param="think"
    )


def parse_context(text: str | None) -> int | None:
    """`4096`, `32k` (times 1,024) or `auto` (None). Raises: RequestError."""
    if text is None or text.lower() == "auto":
        return None
    digits = text[:-1] if text[-1:] in ("k", "K") else text
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 12
    if not is_number or int(digits) == 0:
        raise RequestError(f"--ctx must be like 4096, 32k or auto, found {text!r:.40}", param="ctx")
    return int(digits) * (1024 if digits != text else 1)


def parse_speculation(drafter: str, max_draft: int, ngram: str) -> SpeculationConfig:
    """`--spec`, `--spec-max`, `--spec-ngram`. Raises: RequestError."""
    found = re.fullmatch("([0-9]{1,3}):([0-9]{1,3})", ngram)
    if found is None:
        raise RequestError(
            f"--spec-ngram must be like 2:8, found {ngram!r:.40}", param="spec_ngram"
        )
    return SpeculationConfig(drafter, max_draft, int(found[1]), int(found[2]))


def parse_size(text: str, param: str) -> int:
    """Bytes from `512MiB`, `2GiB`, `1.5g` or a number of bytes. Raises: RequestError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([kmgt]?)(i?b)?", text.strip().lower())
    if found is None or (found[2] == "" and "." in found[1]):
        raise RequestError(
            f"--{param} must be a size like 512MiB or 2GiB, found {text!r:.40}", param=param
        )
    if not found[2] and not found[3] and 0 < int(found[1]) < 1024:
        raise RequestError(
            f"--{param} {text}: {text} of what?", param=param, hint=f"--{param} {text}GiB"
        )
    # A letter alone, or with iB, counts in 1,024; with B, as disks are sold, in 1,000.
    unit = 1000 if found[3] == "b" else 1024
    return int(float(found[1]) * unit ** " kmgt".index(found[2] or " "))


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """`ID=BIAS` entries. Raises: RequestError."""
    biases = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError as error:
            raise RequestError(
                f"--logit-bias must be like 42=-1.5, found {entry!r:.60}", param="logit_bias"
            ) from error
    return biases
