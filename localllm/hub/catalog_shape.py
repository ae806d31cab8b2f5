"""The shape of a model in the catalogue, of which no file is here."""

from typing import Any

from localllm.errors import CatalogError, ExitCode
from localllm.hub.catalog import load_catalog
from localllm.model.architectures import ArchSpec, find_architecture
from localllm.model.config import ModelConfig


def catalog_shape(alias: str) -> tuple[ModelConfig, ArchSpec, dict[str, Any]]:
    """Sizes and architecture of a model in the catalogue, and the fields of its config.json.

    Raises: CatalogError for a name that is not there, or has no sizes there.
    """
    catalog = load_catalog()
    if alias not in catalog:
        raise CatalogError(
            f"random weights take their shape from the catalogue, which has no {alias!r:.100}",
            where=f"known: {', '.join(name for name, each in catalog.items() if each.sizes)}",
            hint="one of these",
            exit_code=ExitCode.USAGE,
        )
    raw = catalog[alias].config_json()
    spec = find_architecture(catalog[alias].architecture)
    config = ModelConfig.from_hf({**spec.config_defaults, **raw}, f"models.toml: {alias}")
    return config, spec, raw
