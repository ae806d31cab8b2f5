"""Prompts of rerankers: a question and a document, of which the model tells how well they match."""

from dataclasses import dataclass
from typing import Literal

from localllm.text.prompt import Conversation
from localllm.text.tokenizer import Tokenizer

# "template": the chat template knows the roles; "qwen3": as below; "plain": one after the other.
PairForm = Literal["template", "qwen3", "plain"]

# Zhang et al. 2025, "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation
# Models", and the model card of Qwen3-Reranker: the model was trained with these words.
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_ANSWERS = ("yes", "no")


@dataclass(frozen=True, slots=True)
class PairWriter:
    """Writes pairs in one form. `task`: what is looked for, where a request does not say;
    `is_begun`: the template begins the answer.
    """

    tokenizer: Tokenizer
    form: PairForm
    task: str | None = None
    is_begun: bool = True

    def write(self, query: str, document: str, task: str | None = None) -> list[int]:
        """The token ids. Special tokens in a text are plain text, unless its form is "plain".

        Raises: RequestError, TemplateError.
        """
        task = task or self.task
        encode = self.tokenizer.encode
        match self.form:
            case "template":
                messages = [
                    *([{"role": "system", "content": task}] if task else []),
                    {"role": "query", "content": query},
                    {"role": "document", "content": document},
                ]
                prompt = self.tokenizer.encode_chat(
                    Conversation(messages, variables={"add_generation_prompt": self.is_begun})
                )
                return list(prompt.token_ids)
            case "qwen3":
                text = f"<Instruct>: {task or _TASK}\n<Query>: {query}\n<Document>: {document}"
                return [
                    *encode(_BEFORE, add_special_tokens=False, parse_special=True),
                    *encode(text, add_special_tokens=False),
                    *encode(_AFTER, add_special_tokens=False, parse_special=True),
                ]
            case "plain":
                # Whoever uses such a model writes its marks around the texts.
                text = f"{task}\n{query}" if task else query
                return encode(text + document, add_special_tokens=True, parse_special=True)

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of `text`, of at most `num_tokens` tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= num_tokens:
            return text
        # A character can end in the middle.
        return self.tokenizer.decode(ids[:num_tokens]).rstrip("\ufffd")
