"""The page that goes with a model of our own: what each of its tensors is, and how they make logits."""

from __future__ import annotations

from jaxtyping import PyTree

from lrkv_jax.accounting import abstract_attention
from lrkv_jax.attention import families
from lrkv_jax.config import RunConfig
from lrkv_jax.handover import by_name

LETTERS = {
    "layers": "N",
    "vocab": "V",
    "embed": "D",
    "heads": "H",
    "kv_heads": "K",
    "head_dim": "C",
    "mlp": "F",
    "rank": "R",
    "latent": "L",
    "rotary": "P",
}
MEANING = {
    "embed": "embedding, a row a token",
    "unembed": "unembedding",
    "final_norm.gain": "gain of the norm before the unembedding",
    "attention_norm.gain": "gain of the norm before the attention",
    "mlp_norm.gain": "gain of the norm before the MLP",
    "mlp.w_up.w": "MLP, into the hidden layer",
    "mlp.w_gate.w": "MLP, gate of the hidden layer",
    "mlp.w_down.w": "MLP, out of the hidden layer",
    "attention.w_q.w": "W_Q, queries (MLA: the C unrotated dimensions of each head, then the P rotated)",
    "attention.w_k.w": "W_K, keys",
    "attention.w_v.w": "W_V, values",
    "attention.w_o.w": "output of all heads",
    "attention.w_k_shared.w": "W_shared of the keys",
    "attention.w_v_shared.w": "W_shared of the values",
    "attention.u_k.w": "U_h of the keys: code_h = x U_h",
    "attention.u_v.w": "U_h of the values",
    "attention.b_k.w": "B_h of the keys: k_h = x W_shared + code_h B_h",
    "attention.b_v.w": "B_h of the values",
    "attention.w_down.w": "W_down: the latent c = norm(x W_down)",
    "attention.w_rotary.w": "W_rotary: the rotary key that all heads share",
    "attention.w_up_k.w": "W_up,K: keys from the latent",
    "attention.w_up_v.w": "W_up,V: values from the latent",
    "attention.bias_q": "added to queries, before norm and rotation",
    "attention.bias_k": "added to keys, before norm and rotation",
    "attention.bias_v": "added to values",
    "attention.gain_q": "times normed queries, before rotation",
    "attention.gain_k": "times normed keys, before rotation",
}


def page(config: RunConfig, params: PyTree) -> str:
    """README.md of an exported model that is no Llama, Qwen2 or Qwen3."""
    family = families()[config.attention.family]
    told = ", ".join(f"{name} = {value}" for name, value in config.attention if value not in (None, ()))
    return f"""# Model of lrkv-jax: {config.attention.family}

`config.json` holds the run's whole configuration under `run`. Where these tensors came from, they go back with

    python -m lrkv_jax.hf import THIS_FOLDER RUN_DIR

## From tokens to logits

{_forward(config)}

The attention ({told}):

{(family.__doc__ or "").strip()}

## Tensors

Linear maps are [inputs, outputs]; the layers are stacked along N, the first axis. Rotary embedding turns dimension m of
a head with m + C/2.

| tensor | shape | | what it is |
|---|---|---|---|
{_rows(params)}
"""


def _forward(config: RunConfig) -> str:
    model, attention = config.model, config.attention
    start = "norm(embed[token])" if model.embed_norm else "embed[token]"
    inner = "w_up(x) · silu(w_gate(x))" if model.mlp == "swiglu" else "relu(w_up(x))²"
    out = "hidden · embedᵀ" if model.tie_embeddings else "hidden · unembed"
    cap, scale = model.logit_softcap, abstract_attention(model, attention).scale
    rows = {
        "start": f"x = {start}",
        "each layer": "x += attention(norm(x)); x += mlp(norm(x))",
        "mlp(x)": f"w_down({inner})",
        "end": f"hidden = norm(x); logits = {f'{cap} · tanh({out} / {cap})' if cap else out}",
        "norm": f"x / sqrt(mean(x²) + {model.norm_eps}){', times a gain' if model.norm_gain else ', no gain'}",
        "scores": f"times {scale:.7g}; query head h reads key/value head h // (H/K)",
    }
    return "\n".join(f"    {name:<14} {text}" for name, text in rows.items())


def _rows(params: PyTree) -> str:
    """Of the table of tensors."""
    lines = []
    for name, param in by_name(params).items():
        letters = ", ".join(LETTERS.get(axis, axis) for axis in param.axes)
        meaning = MEANING.get(name.removeprefix("blocks."), "")
        lines.append(f"| {name} | {list(param.get_value().shape)} | [{letters}] | {meaning} |")
    return "\n".join(lines)
