"""How different a run's attention heads are, layer by layer.

    python -m lrkv_jax.diversity RUN_DIR [--step newest|best|N] [--out DIR]

Head h scores by the bilinear form A_h = W_Q,h W_K,hᵀ [D, D], which stays the same when the head's own basis is changed
(its gauge: W_Q,h O and W_K,h O with a rotation O); the weights don't. Two heads are as similar as the cosine between
their A_h (lrkv.md section 5). The effective rank exp(entropy of the eigenvalue shares) of these similarities counts
heads: 1 where all are the same, H where they are orthogonal. Centred, it counts what is left when the heads' mean form
is taken away (kernel PCA): at most H − 1, and reported as 1 where nothing is left.

A_h is what the families say in `head_maps`: scores at distance 0. Rotation, what QK-norm divides by and biases are no
part of it; gains are, QK-norm's and one before the attention, being factors of the maps. The similarities come from
W_Q and W_K, and A_h never exists.

Writes diversity.json and similarity.png into RUN_DIR/diversity (with --step, RUN_DIR/diversity-STEP), or DIR.
"""

from __future__ import annotations

import argparse
import io
import math
from typing import Any

import matplotlib
import numpy as np
from flax import nnx
from jaxtyping import Float

from lrkv_jax.config import RunConfig
from lrkv_jax.rundir import write_json
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.storage import AnyPath, path
from lrkv_jax.trained import restored
from lrkv_jax.transformer import Block, Transformer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROUNDING = 1e-12  # of the similarities' trace: what centring leaves of equal heads


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    parser = Parser("python -m lrkv_jax.diversity", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=path)
    parser.add_argument("--step", default="newest", help="newest, best, or a step's number")
    parser.add_argument("--out", type=path, metavar="DIR")
    options = parser.parse_args(arguments)
    blocks, step = load_blocks(options.run_dir, options.step)
    grams = [similarities(*block_maps(block)) for block in blocks]
    rows = [
        {"layer": i, "uncentred": effective_rank(g), "centred": effective_rank(centre(g)), "heads": len(g)}
        for i, g in enumerate(grams)
    ]
    name = "diversity" if options.step == "newest" else f"diversity-{options.step}"
    out = options.out or options.run_dir / name
    print(table(rows, step))
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "similarity.png").write_bytes(heat_maps(grams, f"{options.run_dir.resolve().name}, step {step:,}"))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    write_json(out / "diversity.json", rows)
    return 0


def load_blocks(run_dir: AnyPath, which: str) -> tuple[list[Block], int]:
    """A run's layers in float32, on the first device, and the step they are of. Raises UserError as a restore does."""
    config = RunConfig.load(run_dir)
    model = config.model.model_copy(update={"dtype": "float32"})  # as weights are kept, whatever computed with them
    abstract = nnx.eval_shape(lambda: Transformer(model, config.attention, nnx.Rngs(params=0)))
    graph, template = nnx.split(abstract)
    params, step = restored(run_dir, config, template, which)
    return nnx.merge(graph, params).split()[1], step


def block_maps(block: Block) -> tuple[Float[np.ndarray, "D H Q"], Float[np.ndarray, "D H Q"]]:
    """W_Q and W_K of a layer's heads as they act on the normed residual stream, in float64."""
    w_q, w_k = (np.asarray(w, np.float64) for w in block.attention.head_maps())
    if block.attention_norm.gain is not None:
        gain = np.asarray(block.attention_norm.gain.get_value(), np.float64)[:, None, None]
        w_q, w_k = gain * w_q, gain * w_k
    return w_q, w_k


def similarities(w_q: Float[np.ndarray, "D H Q"], w_k: Float[np.ndarray, "D H Q"]) -> Float[np.ndarray, "H H"]:
    """Cosines between the heads' A_h: ⟨A_i, A_j⟩ / (‖A_i‖ ‖A_j‖), of which the diagonal is 1.

    ⟨A_i, A_j⟩ = tr(W_K,iᵀ W_K,j W_Q,jᵀ W_Q,i), a head i at a time: at most Q x Q numbers a pair, nothing of D x D.
    Raises UserError where a head's form is zero, which has no direction.
    """

    def row(i: int) -> np.ndarray:
        queries, keys = (np.tensordot(w[:, i], w, axes=(0, 0)) for w in (w_q, w_k))  # [Q, H, Q]
        return (queries * keys).sum(axis=(0, 2))

    gram = np.stack([row(i) for i in range(w_q.shape[1])])
    norms = np.sqrt(np.diag(gram))
    if not norms.all():
        raise UserError(f"head {int(np.argmin(norms))} scores all tokens 0: its similarity to others is undefined")
    return gram / np.outer(norms, norms)


def centre(gram: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "H H"]:
    """The Gram matrix of the same vectors with their mean taken away; zero where only rounding is left."""
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1, keepdims=True) + gram.mean()
    return centred if np.trace(centred) > ROUNDING * np.trace(gram) else np.zeros_like(gram)


def effective_rank(gram: Float[np.ndarray, "H H"]) -> float:
    """exp(−Σ p ln p) of the eigenvalue shares p; 1 for the zero matrix, whose shares are 0/0."""
    eigenvalues = np.linalg.eigvalsh(gram)
    if not eigenvalues.any():
        return 1.0
    positive = eigenvalues[eigenvalues > 0]  # rounding leaves some below
    shares = positive / positive.sum()
    return math.exp(-(shares * np.log(shares)).sum())


def table(rows: list[dict[str, Any]], step: int) -> str:
    """Effective ranks by layer and their mean, each with its percentage of H."""
    heads = rows[0]["heads"]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("uncentred", "centred")}

    def line(label: Any, row: dict[str, Any]) -> str:
        cells = (f"{row[name]:.3f} ({100 * row[name] / heads:.1f} %)" for name in ("uncentred", "centred"))
        return f"{label:<5}" + "".join(f"  {cell:<17}" for cell in cells).rstrip()

    head = f"effective rank of {heads} heads, step {step:,}\n{'layer':<5}  {'uncentred':<17}  centred"
    return "\n".join([head, *(line(row["layer"], row) for row in rows), line("mean", means)])


def heat_maps(grams: list[np.ndarray], title: str) -> bytes:
    """A PNG with a panel a layer, all on one scale, which ends at the largest similarity of two different heads."""
    heads, columns = len(grams[0]), min(len(grams), 6)
    others = ~np.eye(heads, dtype=bool)
    limit = max([0.01, *(abs(gram[others]).max() for gram in grams if heads > 1)])
    lines = math.ceil(len(grams) / columns)
    size = (1.6 * columns + 1.2, 1.75 * lines + 0.6)
    figure, panels = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat:
        panel.axis("off")
    for layer, (gram, panel) in enumerate(zip(grams, panels.flat, strict=False)):
        shown = np.ma.masked_where(~others, gram)
        image = panel.imshow(shown, cmap="PuOr", vmin=-limit, vmax=limit)
        panel.set(title=f"layer {layer}", xticks=[], yticks=[], facecolor="0.5")
        panel.axis("on")
    figure.suptitle(title)
    figure.colorbar(image, ax=panels, label="similarity of two heads", shrink=0.9, aspect=25)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return picture.getvalue()


if __name__ == "__main__":
    command(main)()
