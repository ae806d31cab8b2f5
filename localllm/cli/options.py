"""Flags that several commands share, and what they are turned into."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from localllm.cli.flag_values import parse_context, parse_logit_bias, parse_size
from localllm.cli.flags import option
from localllm.cli.user_input import read_file
from localllm.engine.config import KV_CACHE_DTYPES, EngineConfig
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import RequestError
from localllm.text.grammar import Grammar
from localllm.text.prompt import THINK_LEVELS

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
