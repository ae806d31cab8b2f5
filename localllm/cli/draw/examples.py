"""The examples at the end of each command's help."""

_EXAMPLES: dict[str, tuple[str, ...]] = {
    "chat": (
        'localllm chat "What is the KV cache?"',
        "localllm chat qwen3-4b",
        'git diff | localllm chat qwen3-4b "Write a commit message for this." > message.txt',
        'localllm chat -f report.md "Summarise this." --json',
        'localllm chat qwen3-4b --each-line "Extract the person." < mails.txt > persons.txt',
        'localllm chat --continue "And in one sentence?"',
        "cat notes.txt | localllm chat qwen3-4b --keepalive 5m --json-schema task.json",
    ),
    "serve": (
        "localllm serve qwen3-4b",
        "localllm serve qwen3-4b --host 0.0.0.0 --api-key-file keys.txt",
    ),
    "launch": (
        "localllm launch claude qwen3.6-27b --ctx 64k",
        "localllm launch aider -- --no-git",
        "localllm launch codex --dry-run",
    ),
    "quantize": (
        "localllm quantize qwen3-4b",
        "localllm quantize qwen3-4b ./small --method awq+gptq --group-size 32",
        "localllm quantize qwen3-4b --dry-run",
    ),
    "eval": (
        "localllm eval qwen3-4b --text book.txt",
        "localllm eval ./small --text book.txt --against qwen3-4b --max-kl 0.05",
    ),
    "bench": (
        "localllm bench qwen3-4b",
        "localllm bench --random-weights --weights int4 --batch 1,4,16",
        "localllm bench --url http://127.0.0.1:8000 --batch 16",
    ),
    "pull": ("localllm pull qwen3-8b --int4", "localllm pull org/name@revision --dry-run"),
    "warm": ("localllm warm qwen3-4b",),
    "ps": ("localllm ps", "localllm ps --json"),
    "stop": ("localllm stop", "localllm stop qwen3-4b"),
    "limits": ("localllm limits",),
    "ls": ("localllm ls", "localllm ls --json | jq .name"),
    "show": ("localllm show qwen3-4b", "localllm show ./my-checkpoint --template"),
    "rm": ("localllm rm qwen3-8b",),
    "plan": (
        "localllm plan",
        "localllm plan qwen3-8b --gpu rtx-4060",
        "localllm plan qwen3-8b --vram 6GiB --ctx 16k --json",
    ),
    "doctor": ("localllm doctor", "localllm doctor --json > report.jsonl"),
}


def examples(command: str) -> str:
    """The examples of a command, as the end of its help."""
    lines = [f"  {line}" for line in _EXAMPLES[command]]
    return "\n".join(["\b", "Examples:", *lines])
