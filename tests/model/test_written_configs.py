"""Configs as transformers writes them: the names of its attribute maps, and its floats."""

import json
from dataclasses import fields
from typing import Any

import pytest
from class_configs import KINDS
from every_family import EVERY_FAMILY, class_of, small_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.errors import UnsupportedModelError
from localllm.model.families.table import architecture_of

# The class gives its windowed layers another base than the one that the file names.
OWN_THETA = {"Olmo3ForCausalLM": {"rope_theta": 500000.0}}


def written(family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers writes it after it has read `raw`."""
    said = {name: value for name, value in raw.items() if name != "model_type"}
    config = json.loads(CONFIG_MAPPING[KINDS[family]](**said).to_json_string())
    return {**config, "architectures": [family]}


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_what_transformers_writes_again_reads_the_same(family: str) -> None:
    own = class_of(family)
    raw = {**small_config(family), **OWN_THETA.get(own, {})}
    expected, found = architecture_of(raw), architecture_of(written(own, raw))
    for field in (each for each in fields(expected) if each.compare):
        assert getattr(found, field.name) == getattr(expected, field.name), field.name


@pytest.mark.parametrize("family", KINDS)
def test_a_field_may_have_any_name_of_its_class(family: str) -> None:
    raw = small_config(family)
    expected = architecture_of(raw)
    for other, written_name in CONFIG_MAPPING[KINDS[family]].attribute_map.items():
        for name, known in ((other, written_name), (written_name, other)):
            if known in raw:
                renamed = {key: value for key, value in raw.items() if key != known}
                assert architecture_of({**renamed, name: raw[known]}) == expected, name


def test_steps_of_mamba_without_a_limit_are_read_in_both_spellings() -> None:
    for family in ("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"):
        raw = small_config(family)
        for most in ({"__float__": "Infinity"}, float("inf")):
            assert architecture_of({**raw, "time_step_limit": [0.0, most]}) == architecture_of(raw)
        with pytest.raises(UnsupportedModelError, match="limits on the steps"):
            architecture_of({**raw, "time_step_limit": [0.0, {"__float__": "NaN"}]})


def test_older_names_of_layers_are_known_in_every_family() -> None:
    raw = small_config("OlmoHybridForCausalLM")
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [older[kind] for kind in raw["layer_types"]]
    assert architecture_of({**raw, "layer_types": kinds}) == architecture_of(raw)
