"""The table of families: for each of GGUF's architectures, its class, and what its keys and names
mean beyond what all have in common. Of several rows, the first that applies to a file.

Source: `conversion/*.py` and `gguf-py/gguf/constants.py` of llama.cpp, and the classes of
transformers.
"""

from collections.abc import Mapping

from localllm.model.gguf import dense_fields as dense
from localllm.model.gguf import expert_fields as experts
from localllm.model.gguf import hybrid_fields as hybrid
from localllm.model.gguf import names
from localllm.model.gguf.family import GgufFamily
from localllm.model.gguf.heads import gemma4_heads, latent_heads, unturned_heads
from localllm.model.gguf.keys import GgufKeys

GGUF_FAMILIES: Mapping[str, tuple[GgufFamily, ...]] = {
    "llama": (
        GgufFamily(
            "MixtralForCausalLM",
            experts.mixtral,
            {
                "ffn_gate_inp": "block_sparse_moe.gate",
                **names.experts_at("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
            },
            applies=experts.has_experts,
            is_paired=True,
        ),
        GgufFamily("LlamaForCausalLM", dense.llama, is_paired=True),
    ),
    "mistral3": (GgufFamily("Ministral3ForCausalLM", dense.mistral3, is_paired=True),),
    "qwen2": (GgufFamily("Qwen2ForCausalLM"),),
    "qwen2moe": (GgufFamily("Qwen2MoeForCausalLM", experts.qwen2_moe),),
    "qwen3": (GgufFamily("Qwen3ForCausalLM", dense.attention_bias),),
    "qwen3moe": (GgufFamily("Qwen3MoeForCausalLM", experts.qwen3_moe),),
    "qwen3next": (
        GgufFamily(
            "Qwen3NextForCausalLM", hybrid.qwen3_next, names.DELTA_NET, has_raised_norms=True
        ),
    ),
    "qwen35": (
        GgufFamily("Qwen3_5ForCausalLM", hybrid.qwen3_5, names.DELTA_NET, has_raised_norms=True),
    ),
    "qwen35moe": (
        GgufFamily(
            "Qwen3_5MoeForCausalLM", hybrid.qwen3_5_moe, names.DELTA_NET, has_raised_norms=True
        ),
    ),
    "gemma2": (GgufFamily("Gemma2ForCausalLM", dense.gemma2, names.AROUND, has_raised_norms=True),),
    "gemma3": (GgufFamily("Gemma3ForCausalLM", dense.gemma3, names.AROUND, has_raised_norms=True),),
    "gemma4": (
        GgufFamily("Gemma4ForCausalLM", dense.gemma4, names.GEMMA4, names.GEMMA4_TOP, gemma4_heads),
    ),
    "phi3": (GgufFamily("Phi3ForCausalLM", dense.phi3, names.WHOLE_MLP),),
    "olmo2": (
        GgufFamily(
            "Olmo3ForCausalLM",
            dense.olmo3,
            names.BEHIND,
            applies=lambda keys: "attention.sliding_window" in keys,
        ),
        GgufFamily("Olmo2ForCausalLM", names=names.BEHIND),
    ),
    "olmoe": (GgufFamily("OlmoeForCausalLM", experts.olmoe),),
    "smollm3": (GgufFamily("SmolLM3ForCausalLM", dense.smollm3, is_paired=True),),
    "granite": (GgufFamily("GraniteForCausalLM", dense.granite, is_paired=True),),
    "granitemoe": (
        GgufFamily(
            "GraniteMoeHybridForCausalLM",
            experts.granite_moe_shared,
            names.GRANITE_EXPERTS,
            applies=experts.has_shared_experts,
            is_paired=True,
        ),
        GgufFamily(
            "GraniteMoeForCausalLM", experts.granite_moe, names.GRANITE_EXPERTS, is_paired=True
        ),
    ),
    "granitehybrid": (
        GgufFamily(
            "GraniteMoeHybridForCausalLM",
            hybrid.granite_hybrid,
            {**names.GRANITE_EXPERTS, **names.mamba_at("mamba")},
            applies=experts.has_experts,
            is_paired=True,
        ),
        GgufFamily(
            "GraniteMoeHybridForCausalLM",
            hybrid.granite_hybrid,
            {
                "ffn_gate": "shared_mlp.gate_proj",
                "ffn_up": "shared_mlp.up_proj",
                "ffn_down": "shared_mlp.down_proj",
                **names.mamba_at("mamba"),
            },
            is_paired=True,
        ),
    ),
    "nemotron_h": (
        GgufFamily(
            "NemotronHForCausalLM", hybrid.nemotron_h, names.NEMOTRON_H, heads=unturned_heads
        ),
    ),
    "nemotron_h_moe": (
        GgufFamily(
            "NemotronHForCausalLM", hybrid.nemotron_h_moe, names.NEMOTRON_H, heads=unturned_heads
        ),
    ),
    "lfm2": (GgufFamily("Lfm2ForCausalLM", hybrid.lfm2, names.LFM2, names.LFM2_TOP),),
    "lfm2moe": (GgufFamily("Lfm2MoeForCausalLM", hybrid.lfm2_moe, names.LFM2, names.LFM2_TOP),),
    "deepseek2": (
        GgufFamily(
            "DeepseekV3ForCausalLM",
            experts.deepseek_v3,
            names.LATENT,
            heads=latent_heads,
            applies=experts.is_sigmoid,
        ),
        GgufFamily("DeepseekV2ForCausalLM", experts.deepseek_v2, names.LATENT, heads=latent_heads),
    ),
    "glm4": (
        GgufFamily(
            "Glm4ForCausalLM",
            dense.attention_bias,
            {
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                **names.WHOLE_MLP,
            },
        ),
    ),
    "glm4moe": (
        GgufFamily(
            "Glm4MoeForCausalLM",
            experts.glm4_moe,
            {
                **names.BEHIND,
                **names.shared_at("mlp.shared_experts"),
                **names.CORRECTED,
            },
        ),
    ),
    "gpt-oss": (
        GgufFamily(
            "GptOssForCausalLM",
            experts.gpt_oss,
            {
                **names.BEHIND,
                "ffn_gate_inp": "mlp.router",
                "attn_sinks.weight": "self_attn.sinks",
            },
        ),
    ),
    "cohere2": (GgufFamily("Cohere2ForCausalLM", dense.cohere2),),
    "exaone4": (GgufFamily("Exaone4ForCausalLM", dense.exaone4, names.BEHIND),),
    "ernie4_5": (GgufFamily("Ernie4_5ForCausalLM", dense.ernie),),
    "hunyuan-dense": (
        GgufFamily(
            "HunYuanDenseV1ForCausalLM",
            dense.attention_bias,
            {
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
    ),
    "seed_oss": (GgufFamily("SeedOssForCausalLM", dense.seed_oss, names.BEHIND),),
}


def family_of(keys: GgufKeys) -> GgufFamily | None:
    """The family of a file; None if it is not known."""
    rows = GGUF_FAMILIES.get(keys.architecture, ())
    return next((row for row in rows if row.applies(keys)), None)
