"""The built-in model with templates of families that call tools."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.conftest import Server, end, start_server

from localllm.hub.checkpoint import open_checkpoint

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks it up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_traffic")
]
_MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What each family's own template is known by.
TEMPLATES = {
    "hermes": (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
        'Answer <tool_call>\n{"name": N, "arguments": A}\n</tool_call>{% endif %}'
        + _MESSAGES.replace("CALL", "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>")
    ),
    "llama": (
        "{# <|start_header_id|> #}{% if tools %}{{ tools | tojson }}"
        'Answer {"name": N, "parameters": P}{% endif %}'
        + _MESSAGES.replace(
            "CALL",
            '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
        )
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
        + _MESSAGES.replace("CALL", "[TOOL_CALLS][{{ c.function | tojson }}]")
    ),
    "command": (
        "{% if tools %}Answer <|START_ACTION|>{{ tools | tojson }}{% endif %}"
        + _MESSAGES.replace("CALL", "{{ c.function | tojson }}")
    ),
    "harmony": (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        + _MESSAGES.replace(
            "CALL",
            '{{ "to=functions." + c.function.name + "<|channel|>commentary " + "json<|message|>" }}'
            "{{ c.function.arguments | tojson }}",
        )
    ),
    "glm4.5": (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        + _MESSAGES.replace(
            "CALL",
            "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
        )
    ),
    "glm4": (
        "{# <|observation|>, metadata #}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.metadata }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@contextmanager
def tool_calling_server(family: str, home: Path, folder: Path) -> Iterator[Server]:
    """The model with the template of `family`, served as `pocket`; `folder`: for its files."""
    shutil.copytree(open_checkpoint().folder, folder / "pocket")
    (folder / "pocket" / "chat_template.jinja").write_text(TEMPLATES[family])
    flags = ("--served-model-name", "pocket", "--max-num-seqs", "4")
    server = start_server(home, *flags, model=str(folder / "pocket"))
    yield server
    end(server)
