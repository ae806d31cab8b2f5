"""What config.json leaves out is as the class has it in transformers."""

from typing import Any

import pytest
from class_configs import LEFT, SAID, whole_config

from localllm.model.architecture import Architecture
from localllm.model.families.table import FAMILIES, architecture_of


def read(raw: dict[str, Any]) -> Architecture:
    return architecture_of({**raw, **LEFT})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_says_nothing_is_the_default_one(family: str) -> None:
    said = SAID.get(family, {})
    assert read({"architectures": [family], **said}) == read(whole_config(family, **said))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_may_be_left_out(family: str) -> None:
    said = SAID.get(family, {})
    whole = whole_config(family, **said)
    expected = read(whole)
    for name in whole:
        if name in {"architectures", *said}:
            continue
        without = {key: value for key, value in whole.items() if key != name}
        assert read(without) == expected, name
