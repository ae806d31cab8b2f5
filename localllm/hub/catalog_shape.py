"""The shape of a model in the catalogue, without any of its files."""

from typing import Any

from localllm.errors import CatalogError, ExitCode
from localllm.hub.catalog import load_catalog
from localllm.model.architecture import Architecture
from localllm.model.families.table import architecture_of


def catalog_shape(alias: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a model in the catalogue, and the fields of its config.json.

    Raises: CatalogError for a name that the catalogue does not have, or has no sizes for.
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
    return architecture_of(raw, f"models.toml: {alias}"), raw
