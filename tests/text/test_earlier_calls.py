"""Earlier calls are in the prompt, also where the chat template writes none itself."""

import json
from typing import Any

import pytest

from localllm.text.prompt import Conversation
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import COMMAND, GLM4, HERMES, ToolFormat, find_tool_format

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
ARGUMENTS = {"city": "Malmö"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "dry"},
]
# What each family's template is known by, and what it reads of a message.
SMOLLM3 = (
    "{% if xml_tools %}Tools: {% for t in xml_tools %}{{ t.function.name }}{% endfor %}\n"
    'Answer <tool_call>\n{"name": N, "arguments": A}\n</tool_call>\n{% endif %}'
    "{% for m in messages %}{{ '<user>' if m.role == 'tool' else '<' + m.role + '>' }}"
    "{{ m.content }}{% endfor %}"
)
GLM = (
    "{% if tools %}Tools: {{ tools[0].function.name }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'observation' %}<|observation|>\n{{ m.content }}"
    "{% elif m.get('metadata') %}<|assistant|>{{ m.metadata }}\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
)
OTHER = (
    "{% if tools %}<|START_ACTION|>{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.mark.parametrize(
    ("template", "form", "prompt"),
    [
        (
            SMOLLM3,
            HERMES,
            'Tools: weatherAnswer <tool_call>\n{"name": N, "arguments": A}\n</tool_call>\n'
            "<user>Rain?<assistant>Let me look.\n"
            f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call><user>dry',
        ),
        (
            GLM,
            GLM4,
            "Tools: weather\n<|user|>\nRain?<|assistant|>\nLet me look."
            f"<|assistant|>weather\n{WRITTEN}<|observation|>\ndry",
        ),
        (OTHER, COMMAND, f"<|START_ACTION|>Rain?Let me look.CALL{WRITTEN}dry"),
    ],
)
def test_a_conversation_with_calls_is_written_whole(
    template: str, form: ToolFormat, prompt: str
) -> None:
    tokenizer = Tokenizer(lambda: None, {}, {"default": "plain", "tool_use": template})  # type: ignore[arg-type,return-value]
    assert find_tool_format(tokenizer.tool_template or "") == form
    assert tokenizer.render_chat(Conversation(MESSAGES, TOOLS)) == prompt


def test_a_conversation_without_calls_is_left_as_it_is() -> None:
    tokenizer = Tokenizer(lambda: None, {}, {"default": GLM})  # type: ignore[arg-type,return-value]
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.render_chat(Conversation(said)) == "<|user|>\nHi<|assistant|>\nHo"
