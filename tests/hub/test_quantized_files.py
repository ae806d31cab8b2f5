"""Which of a repository's GGUF files a tag means."""

import pytest

from localllm.errors import CatalogError, ExitCode
from localllm.hub.quantized_files import choose, is_model_file, label_of, models_among

SPLIT = [f"BF16/m-BF16-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
NAMES = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-IQ4_XS.gguf", *SPLIT]
AROUND = ["mmproj-F16.gguf", "m.imatrix.gguf", "mtp-m-Q4_K_M.gguf", "eagle3-m-Q8_0.gguf"]
SIZES = dict.fromkeys([*NAMES, *AROUND], 2_500_000_000)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q5_k_s.gguf", "Q5_K_S"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("UD-IQ2_XXS/m-00001-of-00002.gguf", "UD-IQ2_XXS"),
        ("F16/m-Q8_0.gguf", "Q8_0"),
        ("m.BF16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m-Q4_0_4_4.gguf", None),  # withdrawn, and not Q4_0
        ("Phi-3-mini-4k-instruct-q4.gguf", None),
        ("model.gguf", None),
    ],
)
def test_a_file_is_labelled_as_on_the_hub_s_pages(name: str, label: str | None) -> None:
    assert label_of(name) == label


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
        ("bf16", SPLIT),
        ("m-iq4_xs.gguf", ["m-IQ4_XS.gguf"]),
        ("M-Q8_0", ["m-Q8_0.gguf"]),
        (None, ["m-Q4_K_M.gguf"]),
    ],
)
def test_a_tag_means_a_label_or_a_file(tag: str | None, chosen: list[str]) -> None:
    assert choose(SIZES, tag, "org/repo") == chosen


def test_without_an_exact_label_a_part_of_the_name_is_enough() -> None:
    assert choose({"m-UD-Q4_K_M.gguf": 1}, "Q4_K_M", "r") == ["m-UD-Q4_K_M.gguf"]
    assert choose({"Phi-3-q4.gguf": 1, "Phi-3-fp16.gguf": 1}, "q4", "r") == ["Phi-3-q4.gguf"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a-Q8_0.gguf", "a-Q4_K_S.gguf"], "a-Q8_0.gguf"),
        (["a-Q2_K.gguf", "mmproj-Q8_0.gguf"], "a-Q2_K.gguf"),
        (["x.gguf"], "x.gguf"),
    ],
)
def test_without_a_tag_it_is_the_usual_one_or_the_only_one(names: list[str], chosen: str) -> None:
    assert choose(dict.fromkeys(names, 1), None, "r") == [chosen]


@pytest.mark.parametrize("tag", ["Q5_K_M", "mmproj", "F16", "Q4", "imatrix", "8_0"])
def test_a_tag_that_means_no_model_lists_what_there_is(tag: str) -> None:
    with pytest.raises(CatalogError) as caught:
        choose(SIZES, tag, "org/repo")
    assert caught.value.exit_code == ExitCode.MODEL
    assert "Q4_K_M (2.5 GB)" in caught.value.where
    assert "BF16 (7.5 GB)" in caught.value.where
    assert "F16 (2.5 GB)" not in caught.value.where.replace("BF16", "")
    assert caught.value.hint.startswith("org/repo:")


def test_where_several_are_meant_the_names_of_files_tell_them_apart() -> None:
    sizes = {"small-Q4_K_M.gguf": 4_000_000, "large-Q4_K_M.gguf": 8_000_000}
    for tag in ("Q4_K_M", None):
        with pytest.raises(CatalogError) as caught:
            choose(sizes, tag, "r")
        assert caught.value.where == "large-Q4_K_M (8.0 MB), small-Q4_K_M (4.0 MB)"
    assert choose(sizes, "small-q4_k_m", "r") == ["small-Q4_K_M.gguf"]
    with pytest.raises(CatalogError, match="2 GGUF models; a tag says which one"):
        choose({"a-Q2_K.gguf": 1, "a-Q3_K_M.gguf": 1}, None, "r")


def test_a_split_set_is_one_model_and_only_if_it_is_whole() -> None:
    assert models_among(dict.fromkeys(SPLIT, 5)) == {SPLIT[0]: 15}
    assert models_among(dict.fromkeys(SPLIT[:2], 5)) == {}
    assert models_among({"m-00001-of-00000.gguf": 5}) == {"m-00001-of-00000.gguf": 5}
    with pytest.raises(CatalogError, match="no GGUF file"):
        choose(dict.fromkeys(SPLIT[1:], 5), "BF16", "r")


def test_what_belongs_to_a_model_is_none() -> None:
    assert not any(map(is_model_file, (*AROUND, SPLIT[1], "x.safetensors", "dflash-m.gguf")))
    assert is_model_file("Qwen3.6-27B-MTP-Q8_0.gguf")  # with heads of its own
    assert choose(SIZES, "Q4_K_M", "r") == ["m-Q4_K_M.gguf"]
