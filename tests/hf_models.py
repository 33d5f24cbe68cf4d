"""Small checkpoints of the Hugging Face kind with random weights, and what the transformers library makes of them.

Names and shapes of tensors are written from transformers' modules, not from our table. The logits lie in
hf_logits.npz, so that the tests need neither torch nor transformers; this makes it anew, where both are:

    python tests/hf_models.py
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lrkv_jax.data import Tokenizer

LOGITS = Path(__file__).parent / "hf_logits.npz"
V, T, SHOWN = 263, 23, 16  # of V logits every 16th is kept
BEGIN, END = "<|begin|>", "<|end|>"
# Within the original 64 tokens, the pairs of a head turn 10, 3.2, 1.02 and 0.3 times: kept, mixed, mixed, slowed.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON = {
    "vocab_size": V,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.01,  # large, so that an epsilon in the wrong place shows
    "rope_theta": 100.0,  # small, so that every pair turns
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
MODELS = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": False,
    },
    "llama-linear": {  # its keys as transformers 5 writes them
        "model_type": "llama",
        "hidden_size": 20,
        "num_attention_heads": 2,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 60.0},
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 14,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 6,
        "tie_word_embeddings": False,
    },
}
TOKENS = np.random.default_rng(5).integers(0, V, (2, T))


def config(name):
    """config.json of a model."""
    return COMMON | MODELS[name]


def shapes(name):
    """Shape by name of every tensor of a model."""
    told = config(name)
    width, hidden, heads = told["hidden_size"], told["intermediate_size"], told["num_attention_heads"]
    kv_heads, size = told.get("num_key_value_heads", heads), told.get("head_dim", width // heads)
    found = {"model.embed_tokens.weight": (V, width), "model.norm.weight": (width,)}
    if not told["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, width)
    for layer in range(told["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"{at}self_attn.{part}_proj.weight"] = (count * size, width)
            if told["model_type"] == "qwen2":
                found[f"{at}self_attn.{part}_proj.bias"] = (count * size,)
            if told["model_type"] == "qwen3" and part != "v":
                found[f"{at}self_attn.{part}_norm.weight"] = (size,)
        found[f"{at}self_attn.o_proj.weight"] = (width, heads * size)
        found[f"{at}mlp.gate_proj.weight"] = found[f"{at}mlp.up_proj.weight"] = (hidden, width)
        found[f"{at}mlp.down_proj.weight"] = (width, hidden)
        found[f"{at}input_layernorm.weight"] = found[f"{at}post_attention_layernorm.weight"] = (width,)
    return found


def weights(name):
    """Tensors by name: random, of a size at which no part of the model is too faint to test."""
    rng = np.random.default_rng([7, *name.encode()])
    return {key: rng.normal(0, 0.35, shape).astype(np.float32) for key, shape in sorted(shapes(name).items())}


def save(name, folder, tensors=None, **changed):
    """Writes a checkpoint; `tensors` and keys of config.json may be others than the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name) | changed))
    save_file(weights(name) if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(folder / "tokenizer.json")
    return folder


def tokenizer():
    """A token a byte, then begin and end, as their ids in config.json say."""
    trained = json.loads(Tokenizer.train(["a"], 258, BEGIN, END)._json)
    vocab = trained["model"]["vocab"]
    ranked = sorted((token for token in vocab if token not in (BEGIN, END)), key=vocab.get)
    trained["model"]["vocab"] = {token: number for number, token in enumerate([*ranked, BEGIN, END])}
    for token in trained["added_tokens"]:
        token["id"] = trained["model"]["vocab"][token["content"]]
    return Tokenizer(json.dumps(trained), BEGIN, END, "the test's tokenizer")


def theirs(folder):
    """Logits [2, T, V] of a checkpoint by transformers, in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        np.savez_compressed(LOGITS, **{name: theirs(save(name, Path(folder) / name))[..., ::SHOWN] for name in MODELS})
