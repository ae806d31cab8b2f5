"""What a worker does with a model's tokenizer and chat template; see DelegatedTokenizer."""

import json
from pathlib import Path
from typing import Any

from localllm.process.frames import Message, prompt_to_wire
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.worker_process import Job


def open_text_jobs(opening: Message) -> Job:
    """The jobs for the tokenizer of a folder. Raises: CheckpointError."""
    tokenizer = Tokenizer.from_folder(Path(opening["folder"]), opening["fallback_template"])
    return lambda message: run_text_job(tokenizer, message)


def run_text_job(tokenizer: Tokenizer, message: Message) -> Message:
    """Encode, count or render, as DelegatedTokenizer asks. Raises: RequestError, TemplateError."""
    asked: dict[str, Any] = json.loads(message["asked"].decode("utf-8", "surrogatepass"))
    match message["job"]:
        case "encode":
            return {"type": "done", "ids": tokenizer.encode(**asked)}
        case "count":
            return {"type": "done", "count": tokenizer.count_at_least(**asked)}
        case "chat":
            variables = asked.pop("variables")
            prompt = tokenizer.encode_chat(**asked, **variables)
            return {"type": "done", "prompt": prompt_to_wire(prompt)}
        case "render":
            variables = asked.pop("variables")
            return {"type": "done", "text": tokenizer.render_chat(**asked, **variables)}
    raise ValueError(f"no such job: {message['job']!r}")
