"""Finds a checkpoint's chat templates, which several files may hold.

In the order of transformers: `chat_template.jinja` with the folder `additional_chat_templates`;
`chat_template` in tokenizer_config.json; and the files of older processors, chat_template.json and
processor_config.json. The first place that has a template gives all of them; further templates in
the folder do without `chat_template.jinja`, if another place has a default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json_object
from localllm.files.model_file import check_link, has_file, read_model_file

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
_OLDER = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
MAX_TEMPLATE_BYTES = 1 << 20


def read_chat_templates(folder: Path, fallback_template: str | None = None) -> dict[str, str]:
    """Templates by name, "default" for a plain chat; `fallback_template` if there is none.

    A template without company is the default, whatever its name. Raises: CheckpointError.
    """
    files = _files(folder)
    templates = files if "default" in files else {**_older(folder), **files}
    if not templates and fallback_template is not None:
        return {"default": fallback_template}
    return {"default": next(iter(templates.values()))} if len(templates) == 1 else templates


def _files(folder: Path) -> dict[str, str]:
    """The templates that are files of their own."""
    files = {"default": folder / FILE} if has_file(folder / FILE) else {}
    if (folder / FOLDER).is_dir():
        check_link(folder / FOLDER)
        files |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    return {name: _read_text(path) for name, path in files.items()}


def _older(folder: Path) -> dict[str, str]:
    """The templates of the first JSON file that has some."""
    paths = (folder / name for name in _OLDER)
    found = (
        _named(read_json_object(path).get("chat_template"), path)
        for path in paths
        if has_file(path)
    )
    return next(filter(None, found), {})


def _read_text(path: Path) -> str:
    try:
        return read_model_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path.name} is not a text file: {error}", where=str(path)
        ) from error


def _named(value: Any, origin: Path) -> dict[str, str]:
    """Templates that are one text, texts by name, or a list of objects with name and template."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(each, Mapping) and {"name", "template"} <= each.keys() for each in value
    ):
        value = {each["name"]: each["template"] for each in value}
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for x in value.values()):
        raise CheckpointError(
            "chat_template must be a text or a list of named templates", where=str(origin)
        )
    return {str(name): text for name, text in value.items()}
