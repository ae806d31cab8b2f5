"""A chat template is found wherever a checkpoint keeps it."""

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import CheckpointError, TemplateError
from localllm.text.prompt import Conversation
from localllm.text.template_files import read_chat_templates
from localllm.text.tokenizer import Tokenizer

NAMED = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
JINJA, CONFIG, OLDER, PROCESSOR = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "chat_template.json",
    "processor_config.json",
)
EXTRA = "additional_chat_templates"
FOUND: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing": ({CONFIG: {}}, {}),
    "a file": ({JINJA: "A"}, {"default": "A"}),
    "the config": ({CONFIG: "A"}, {"default": "A"}),
    "a list in the config": ({CONFIG: NAMED}, {"default": "A", "tool_use": "B"}),
    "names in the config": ({CONFIG: {"default": "A", "rag": "B"}}, {"default": "A", "rag": "B"}),
    "the processor's file": ({OLDER: "A", CONFIG: {}}, {"default": "A"}),
    "the processor's config": ({PROCESSOR: "A"}, {"default": "A"}),
    "a list in the processor's file": ({OLDER: NAMED}, {"default": "A", "tool_use": "B"}),
    "a folder besides": (
        {JINJA: "A", f"{EXTRA}/tool_use.jinja": "B", CONFIG: "C"},
        {"default": "A", "tool_use": "B"},
    ),
    "a folder beside the config": (
        {f"{EXTRA}/tool_use.jinja": "B", CONFIG: NAMED[:1], OLDER: "C"},
        {"default": "A", "tool_use": "B"},
    ),
    "a folder alone": (
        {f"{EXTRA}/rag.jinja": "A", f"{EXTRA}/tool_use.jinja": "B"},
        {"rag": "A", "tool_use": "B"},
    ),
    "a lonely template with a name": ({CONFIG: [{"name": "x", "template": "A"}]}, {"default": "A"}),
    "the file before the config": ({JINJA: "A", CONFIG: NAMED, OLDER: "C"}, {"default": "A"}),
    "the config before the processor": ({CONFIG: "A", OLDER: "B"}, {"default": "A"}),
    "the processor's file before its config": ({OLDER: "A", PROCESSOR: "B"}, {"default": "A"}),
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, told in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(told if name.endswith(".jinja") else json.dumps({"chat_template": told}))
    return folder


@pytest.mark.parametrize("name", FOUND)
def test_templates_are_found_in_the_order_of_transformers(name: str, tmp_path: Path) -> None:
    files, expected = FOUND[name]
    files = {file: None if told == {} else told for file, told in files.items()}
    assert read_chat_templates(write(tmp_path, files)) == expected


def test_the_catalogue_s_template_is_the_last_resort(tmp_path: Path) -> None:
    assert read_chat_templates(tmp_path, "C") == {"default": "C"}
    assert read_chat_templates(write(tmp_path, {OLDER: "A"}), "C") == {"default": "A"}


@pytest.mark.parametrize("told", [7, [7], [{"name": "x"}], {"x": 7}, [["x", "y"]]])
def test_what_is_no_template_is_named(told: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat_template must be a text or a list"):
        read_chat_templates(write(tmp_path, {OLDER: told}))


def test_a_folder_of_templates_that_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.jinja").write_text("A")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / EXTRA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link out of the model's folder"):
        read_chat_templates(tmp_path / "model")


def test_templates_without_a_default_serve_tools_and_are_named_to_others(
    make_checkpoint: Any, edit_json: Any
) -> None:
    folder = make_checkpoint()
    edit_json(folder / CONFIG, chat_template=None)
    names = {f"{EXTRA}/rag.jinja": "A", f"{EXTRA}/tool_use.jinja": "with {{ tools[0].name }}"}
    tokenizer = Tokenizer.from_folder(write(folder, names))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(Conversation([], tools=[{"name": "clock"}])) == "with clock"
    with pytest.raises(TemplateError, match=r"none .* is the default: it has rag, tool_use"):
        tokenizer.render_chat(Conversation([]))
