"""Writes the table of families in docs/models.md from the code and its tests.

python tools/models_page.py          # writes it
python tools/models_page.py --check  # exits with 1 if the page is out of date
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), str(ROOT / "tests/model")]

from every_family import EVERY_FAMILY, small_config  # noqa: E402
from test_against_transformers import CASES  # noqa: E402
from test_every_family import FORMATS  # noqa: E402
from test_towers import TOWERS as TRIED_TOWERS  # noqa: E402

from localllm.model.families.table import FAMILIES, architecture_of  # noqa: E402
from localllm.model.fused.decoder import is_plain, supports  # noqa: E402
from localllm.model.tower import TEXT_MODELS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by tools/models_page.py -->", "<!-- end of what is made -->"
# What people call the models of a class, and what of these models does not work beside images.
NAMES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("Llama 2, 3, 3.1, 3.2", ""),
    "MistralForCausalLM": ("Mistral, Mistral Small 3", ""),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5", ""),
    "Qwen3ForCausalLM": ("Qwen3, Qwen3-VL", ""),
    "Cohere2ForCausalLM": ("Command R7B, Command A", ""),
    "DeepseekV2ForCausalLM": ("DeepSeek V2", ""),
    "DeepseekV3ForCausalLM": ("DeepSeek V3, R1", ""),
    "Ernie4_5ForCausalLM": ("ERNIE 4.5 dense", ""),
    "Exaone4ForCausalLM": ("EXAONE 4", ""),
    "Gemma2ForCausalLM": ("Gemma 2", ""),
    "Gemma3ForCausalLM": ("Gemma 3", ""),
    "Gemma4ForCausalLM": ("Gemma 4 E2B, E4B, 31B; 26B-A4B", ""),
    "Gemma4UnifiedForCausalLM": ("Gemma 4 12B", ""),
    "Glm4ForCausalLM": ("GLM-4", ""),
    "GraniteForCausalLM": ("Granite 3", ""),
    "GptOssForCausalLM": ("gpt-oss", ""),
    "GraniteMoeForCausalLM": ("Granite 3 with experts", ""),
    "GraniteMoeHybridForCausalLM": ("Granite 4", ""),
    "Glm4MoeForCausalLM": ("GLM-4.5 Air, 4.6 with experts", ""),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7 Flash", ""),
    "MixtralForCausalLM": ("Mixtral", ""),
    "OlmoeForCausalLM": ("OLMoE", ""),
    "Qwen2MoeForCausalLM": ("Qwen2 with experts", ""),
    "Qwen3NextForCausalLM": ("Qwen3-Next", ""),
    "Qwen3_5ForCausalLM": ("Qwen3.5, 3.6, 3.8 dense", ""),
    "Qwen3_5MoeForCausalLM": ("Qwen3.5, 3.6, 3.8 with experts", ""),
    "Qwen3MoeForCausalLM": ("Qwen3 with experts, Qwen3-Coder", ""),
    "HunYuanDenseV1ForCausalLM": ("Hunyuan dense", ""),
    "Lfm2ForCausalLM": ("LFM2", ""),
    "Lfm2MoeForCausalLM": ("LFM2 with experts", ""),
    "Lfm3ForCausalLM": ("LFM3", ""),
    "Ministral3ForCausalLM": ("Ministral 3", ""),
    "NemotronHForCausalLM": ("Nemotron-H, Nemotron 3", "no MTP heads"),
    "Olmo2ForCausalLM": ("OLMo 2", ""),
    "Olmo3ForCausalLM": ("OLMo 3", ""),
    "OlmoHybridForCausalLM": ("OLMo hybrid", ""),
    "Phi3ForCausalLM": ("Phi-3, 3.5, 4", ""),
    "SeedOssForCausalLM": ("Seed-OSS", ""),
    "SmolLM3ForCausalLM": ("SmolLM3", ""),
}


def table() -> str:
    """A row for each family, by name."""
    lines = ["| models | class in `config.json` | layers in one call |", "|---|---|---|"]
    num_cases = len(CASES) + len(TRIED_TOWERS)
    for family in sorted(FAMILIES, key=lambda each: NAMES[each][0]):
        name, missing = NAMES[family]
        towers = {
            around for around, kind, *_ in TRIED_TOWERS.values() if TEXT_MODELS.get(kind) == family
        }
        classes = ", ".join(f"`{each}`" for each in (family, *sorted(towers)))
        limits = ", ".join(filter(None, ["text only" if towers else "", missing]))
        shown = f"{name} ({limits})" if limits else name
        lines.append(f"| {shown} | {classes} | {one_call(family)} |")
    formats = ", ".join(FORMATS)
    lines += [
        "",
        f"{num_cases} cases of {len(FAMILIES)} classes are held against transformers. Each of",
        f"the {len(EVERY_FAMILY)} text models is tried with published formats ({formats}),",
        "quantized by `localllm quantize`, with keys in 8 bits, with drafts, and in any company",
        "(`tests/model/test_every_family.py`).",
    ]
    return "\n".join(lines)


def one_call(family: str) -> str:
    """Where all layers of the family are computed in one call."""
    architecture = architecture_of(small_config(family))
    if not supports(architecture.layers, architecture.norm):
        return ""
    return "CPU, GPU with int4" if is_plain(architecture.layers) else "CPU"


def main() -> int:
    """Write or check; the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if made != page:
        sys.stderr.write("docs/models.md is out of date: run python tools/models_page.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
