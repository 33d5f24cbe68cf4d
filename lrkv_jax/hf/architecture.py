"""What a Llama, a Qwen2 and a Qwen3 are in our terms: their config.json to ours and back.

All three have SwiGLU, RMSNorm with gains, rotary embedding in halves and scores over sqrt(C), and attention as our
`gqa`. Qwen2 adds a bias to queries, keys and values, Qwen3 a norm with a gain to unrotated queries and keys.
"""

from __future__ import annotations

from typing import Any

from lrkv_jax.attention import gqa
from lrkv_jax.attention.base import AttentionConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.settings import UserError
from lrkv_jax.transformer import ModelConfig

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What must have this value, or be left out: anything else is a part that we don't have.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,  # would be on the output projection too
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
STRENGTHS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_turns",
    "high_freq_factor": "rope_high_turns",
    "original_max_position_embeddings": "rope_original_context",
}
SCALINGS = {"default": (), "linear": ("factor",), "llama3": tuple(STRENGTHS)}


def imported(config: dict[str, Any]) -> tuple[ModelConfig, AttentionConfig]:
    """Model and attention of a config.json. Raises UserError, naming the key, for what is no model of ours."""
    name = config.get("model_type")
    if name not in CLASSES:
        raise UserError(f"config.json: model_type = {name!r} can't be imported; these can: {', '.join(CLASSES)}")
    for key, value in FIXED.items():
        if config.get(key, value) not in (value, None):
            raise UserError(f"config.json: {key} = {config[key]!r} can't be imported, only {value!r}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(
            f"config.json: layer_types has {', '.join(sorted(set(config['layer_types'])))}; only "
            f"full_attention can be imported"
        )
    width, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    attention = gqa.Config(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        qk_norm=name == "qwen3",
        qk_norm_gain="before_rope" if name == "qwen3" else None,
        qkv_bias=name == "qwen2",
        **_rotary(config),
    )
    model = ModelConfig(
        layers=_needed(config, "num_hidden_layers"),
        width=width,
        mlp_width=_needed(config, "intermediate_size"),
        vocab=_needed(config, "vocab_size"),
        mlp="swiglu",
        norm_gain=True,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        embed_norm=False,
        tie_embeddings=config.get("tie_word_embeddings", False),
        logit_softcap=None,
        dtype="float32" if _dtype(config) == "float32" else "bfloat16",
        scan_layers=True,  # such models are deep, and compile once a layer so
    )
    return model, attention


def _needed(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} = {value!r} must be a positive whole number")
    return value


def _dtype(config: dict[str, Any]) -> str:
    """What the model computes in; float32 where nothing is said, as in transformers."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Our fields of base and scaling. Transformers 5 has one dict for both, earlier ones a key for each."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(told, dict) or any(isinstance(value, dict) for value in told.values()):
        raise UserError("config.json: rope_parameters must be one object for all layers")
    scaling = told.get("rope_type") or told.get("type") or "default"
    if scaling not in SCALINGS:
        raise UserError(f"config.json: rope_type = {scaling!r} can't be imported; these can: {', '.join(SCALINGS)}")
    if told.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"config.json: partial_rotary_factor = {told['partial_rotary_factor']} can't be imported, only 1"
        )
    fields = {"rope_base": told.get("rope_theta") or config.get("rope_theta") or 10000.0}
    for key in SCALINGS[scaling]:
        if key not in told:
            raise UserError(f"config.json: rope_type = {scaling!r} lacks {key}")
        fields[STRENGTHS[key]] = told[key]
    return fields | {"rope_scaling": None if scaling == "default" else scaling}


def kind(config: RunConfig) -> str:
    """Which of the three a gqa model would be."""
    attention = config.attention
    return "qwen3" if attention.qk_norm else "qwen2" if attention.qkv_bias else "llama"


def hindrance(config: RunConfig) -> str | None:
    """The field by which a model is none of the three, and its value; None where it is one exactly."""
    model, attention = config.model, config.attention
    if attention.family != "gqa":
        return f"attention.family = {attention.family}"
    ungained = attention.qk_norm and not attention.qk_norm_gain
    # Qwen2 has no field for a head's dimensions, and transformers refuses a Llama of another width.
    crooked = {
        "llama": model.width % attention.heads,
        "qwen2": attention.heads * attention.head_dim != model.width,
        "qwen3": False,
    }
    reasons = {
        f"model.mlp = {model.mlp}": model.mlp != "swiglu",
        f"model.norm_gain = {model.norm_gain}": not model.norm_gain,
        f"model.embed_norm = {model.embed_norm}": model.embed_norm,
        f"model.logit_softcap = {model.logit_softcap}": model.logit_softcap is not None,
        f"attention.rotary_dim = {attention.rotary}": attention.rotary != attention.head_dim,
        "attention.qk_norm without attention.qk_norm_gain": ungained,
        "attention.qkv_bias with attention.qk_norm": attention.qkv_bias and attention.qk_norm,
        f"attention.heads = {attention.heads} with model.width = {model.width}": crooked[kind(config)],
    }
    return next((line for line, holds in reasons.items() if holds), None)


def exported(config: RunConfig, begin: int, end: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model that nothing hinders; `begin` and `end` are ids of tokens, `dtype` that of tensors."""
    model, attention, name = config.model, config.attention, kind(config)
    strengths = {key: getattr(attention, STRENGTHS[key]) for key in SCALINGS[attention.rope_scaling or "default"]}
    scaling = attention.rope_scaling and {"rope_type": attention.rope_scaling, **strengths}
    # The longest context that it was made for, as far as we know.
    longest = max(config.data.context, round((attention.rope_original_context or 0) * (attention.rope_factor or 1)))
    own = {
        "llama": {"attention_bias": False, "mlp_bias": False, "head_dim": attention.head_dim},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False, "head_dim": attention.head_dim},
    }
    return {
        "architectures": [CLASSES[name]],
        "model_type": name,
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": longest,
        "rope_theta": attention.rope_base,
        "rope_scaling": scaling,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": dtype,
        **own[name],
    }
