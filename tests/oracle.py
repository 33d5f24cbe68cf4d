"""The attention families in float64 NumPy, one vector at a time: what the modules are measured against.

Written from the mathematics (arXiv 2601.11471, with the rotary modes this project makes exact) and not from
`lrkv_jax.attention`. Everything is a loop over batch rows, heads and positions, so that no axis can be transposed,
broadcast or grouped wrongly without it being visible in the text. Only NumPy is imported, and only the names of the
weights and of the configuration fields are shared with the package.

Each family is a function `family(config, weights, x, positions, segments, eps) -> [B, T, D]` of the family's name, with
`weights` a dict of float64 arrays, `x` [B, T, D], `positions` [B, T] and `segments` [B, T] or None.
"""

import numpy as np


def rope(vector, position, base, scaled=lambda frequency: frequency):
    """Rotate the pairs (m, m + dim/2) of one vector [dim] by the angle position · base^(−2m/dim)."""
    half = len(vector) // 2
    rotated = np.empty_like(vector)
    for m in range(half):
        angle = position * scaled(base ** (-2 * m / len(vector)))
        a, b = vector[m], vector[half + m]
        rotated[m] = a * np.cos(angle) - b * np.sin(angle)
        rotated[half + m] = b * np.cos(angle) + a * np.sin(angle)
    return rotated


def rotate(config, vector, position):
    """Rotate one vector by the frequencies of a configuration."""
    return rope(vector, position, config.rope_base, lambda frequency: scale(config, frequency))


def scale(config, frequency):
    """A rotary frequency as `linear` or Llama 3.1's scaling has it, told by its wavelength in positions."""
    scaling = getattr(config, "rope_scaling", None)
    if scaling is None:
        return frequency
    slowed = frequency / config.rope_factor
    if scaling == "linear":
        return slowed
    wavelength, context = 2 * np.pi / frequency, config.rope_original_context
    low, high = config.rope_low_turns, config.rope_high_turns
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return slowed
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * slowed + smooth * frequency


def inverse_rms(vector, eps):
    """1 / sqrt(mean of squares + eps): what RMSNorm without gain multiplies its vector by."""
    return 1.0 / np.sqrt(np.mean(vector * vector) + eps)


def rms_norm(vector, eps):
    """RMSNorm without gain of one vector."""
    return vector * inverse_rms(vector, eps)


def softmax(scores):
    """Probabilities of a list of scores."""
    weights = np.exp(np.array(scores) - max(scores))
    return weights / weights.sum()


def bias(weights, name, head):
    """The head's row of a bias, or zero where the configuration has none."""
    return weights[name][head] if name in weights else 0.0


def gain(weights, name):
    """The gain on normed queries or keys, or one where the configuration has none."""
    return weights.get(f"gain_{name}", 1.0)


def causal_attention(x, heads, segments, score, value, w_o):
    """Every query t averages the values of the keys s <= t of its own segment, head by head; w_o mixes the heads.

    `score(b, h, t, s)` is the scaled logit, `value(b, h, s)` a vector.
    """
    batch, length, _ = x.shape
    y = np.zeros((batch, length, w_o.shape[-1]))
    for b in range(batch):
        for t in range(length):
            seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
            for h in range(heads):
                probabilities = softmax([score(b, h, t, s) for s in seen])
                o = sum(p * value(b, h, s) for p, s in zip(probabilities, seen, strict=True))
                y[b, t] += o @ w_o[h]
    return y


def gqa(config, weights, x, positions, segments, eps):
    """Multi-head, grouped-query and multi-query attention: query head h reads key/value head h // (H/K)."""
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    rotary = config.head_dim if config.rotary_dim is None else config.rotary_dim
    group = config.heads // kv_heads

    def rotate_first(vector, position):
        return np.concatenate([rotate(config, vector[:rotary], position), vector[rotary:]])

    def head(b, i, h, name):
        vector = x[b, i] @ weights[f"w_{name}"][:, h] + bias(weights, f"bias_{name}", h)
        if config.qk_norm:
            vector = rms_norm(vector, eps) * gain(weights, name)
        return rotate_first(vector, positions[b, i])

    def score(b, h, t, s):
        return head(b, t, h, "q") @ head(b, s, h // group, "k") / np.sqrt(config.head_dim)

    def value(b, h, s):
        return x[b, s] @ weights["w_v"][:, h // group] + bias(weights, "bias_v", h // group)

    return causal_attention(x, config.heads, segments, score, value, weights["w_o"])


def mla(config, weights, x, positions, segments, eps):
    """DeepSeek-V2's latent attention: keys and values from one normed latent, and one rotary key for all heads."""
    nope = config.head_dim
    rotary = config.head_dim // 2 if config.rotary_dim is None else config.rotary_dim

    def latent(b, s):
        return rms_norm(x[b, s] @ weights["w_down"], eps)

    def query(b, t, h):
        vector = x[b, t] @ weights["w_q"][:, h] + bias(weights, "bias_q", h)
        vector = np.concatenate([vector[:nope], rotate(config, vector[nope:], positions[b, t])])
        return rms_norm(vector, eps) if config.qk_norm else vector

    def key(b, s, h):
        from_latent = latent(b, s) @ weights["w_up_k"][:, h] + bias(weights, "bias_k", h)
        vector = np.concatenate([from_latent, rotate(config, x[b, s] @ weights["w_rotary"], positions[b, s])])
        return rms_norm(vector, eps) if config.qk_norm else vector

    def score(b, h, t, s):
        return query(b, t, h) @ key(b, s, h) / np.sqrt(nope + rotary)

    def value(b, h, s):
        return latent(b, s) @ weights["w_up_v"][:, h] + bias(weights, "bias_v", h)

    return causal_attention(x, config.heads, segments, score, value, weights["w_o"])


def lrkv(config, weights, x, positions, segments, eps):
    """Low-rank key values: one shared key and value, and per residual head a code of R numbers expanded by B."""
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    group = config.heads // kv_heads

    def code(b, s, k, name):
        return x[b, s] @ weights[f"u_{name}"][:, k]

    def residual(b, s, k, name):
        """What head k adds to the shared key or value: code · B, and the bias."""
        low_rank = code(b, s, k, name) @ weights[f"b_{name}"][k] if config.rank else 0.0
        return low_rank + bias(weights, f"bias_{name}", k)

    def query(b, t, h):
        vector = x[b, t] @ weights["w_q"][:, h] + bias(weights, "bias_q", h)
        return rms_norm(vector, eps) * gain(weights, "q") if config.qk_norm else vector

    def positional_score(b, h, t, s):
        """The unscaled score before QK-norm's key scalar, in the configured mode."""
        k, g = h // group, gain(weights, "k")
        t_position, s_position = positions[b, t], positions[b, s]
        q, shared = query(b, t, h), g * (x[b, s] @ weights["w_k_shared"])
        rotated = rotate(config, q, t_position)
        if config.rope_mode == "full":
            return rotated @ rotate(config, shared + g * residual(b, s, k, "k"), s_position)
        score = rotated @ rotate(config, shared, s_position)
        if config.rope_mode == "shared":  # the residual, its bias with it, carries no position
            return score + q @ (np.zeros_like(q) + g * residual(b, s, k, "k"))
        score += q @ (np.zeros_like(q) + g * bias(weights, "bias_k", k))
        if config.rank:
            q_code = rotate(config, (q * g) @ weights["b_k"][k].T, t_position)
            score += q_code @ rotate(config, code(b, s, k, "k"), s_position)
        return score

    def score(b, h, t, s):
        scale = 1 / np.sqrt(config.head_dim)
        if config.qk_norm:  # of the composed, unrotated key in every mode
            scale *= inverse_rms(x[b, s] @ weights["w_k_shared"] + residual(b, s, h // group, "k"), eps)
        return scale * positional_score(b, h, t, s)

    def value(b, h, s):
        return x[b, s] @ weights["w_v_shared"] + residual(b, s, h // group, "v")

    return causal_attention(x, config.heads, segments, score, value, weights["w_o"])
