"""The last word on a run: a whole split scored, and the result as a table."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from lrkv_jax import accounting, distributed, rundir
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Store, ngram_cross_entropy
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.step import Program
from lrkv_jax.storage import AnyPath


class Result(NamedTuple):
    """What a scored split leaves in the run directory."""

    eval: dict[str, Any]
    """Every field of eval.json."""
    documents: dict[str, Any]
    """Nats, scored tokens and UTF-8 bytes of each document, in the split's order: what a paired comparison needs."""

    def write(self, run_dir: AnyPath, suffix: str = "") -> None:
        """eval.json comes last, since its presence says that the run is finished."""
        rundir.write_json(run_dir / f"documents{suffix}.json", self.documents, indent=None)
        rundir.write_json(run_dir / f"eval{suffix}.json", self.eval)


def score(
    config: RunConfig,
    program: Program,
    params: Any,
    step: int,
    store: Store,
    mesh: Mesh,
    split: str,
    teacher: RunConfig | None = None,
) -> Result:
    """Scores a split; the parameters are those after `step` steps. A `teacher` (teacher.py) has cost FLOPs too."""
    with jax.set_mesh(mesh):
        eval_step, windows = make_eval_step(program, mesh), store.windows(split)
        progress = f"score {split}" if distributed.is_first() else None
        found = evaluate(eval_step, params, windows, config.train.batch_size, mesh, progress=progress)
    unigram, bigram = distributed.agreed(lambda: ngram_cross_entropy(store, split))
    costs = accounting.accounts(config, teacher)
    tokens = step * config.train.batch_size * config.data.context
    result = {
        "family": config.family,
        "split": split,
        "step": step,
        **found.summary(),
        "scored": "answers" if store.marked else "text",
        "unigram_ce": unigram,
        "bigram_ce": bigram,
        "parameters": costs.parameters,
        "cache_values_per_token_per_layer": costs.cache_values_per_token_per_layer,
        "cache_bytes_per_token": costs.cache_bytes_per_token,
        "cache_percent_of_mha": costs.cache_percent_of_mha,
        "train_tokens": tokens,
        "train_flops": tokens * costs.train_flops_per_token,
    }
    by_document = {name: values.tolist() for name, values in found._asdict().items()}
    return Result(result, {"split": split, "step": step, **by_document})


def table(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    split = result["split"]
    tokens = f"{result['tokens']:,} tokens{' of answers' if result.get('scored') == 'answers' else ''}"
    rows = {
        "model": f"{result['family']}, step {result['step']:,}",
        f"{split} CE": f"{result['ce']:.4f} ± {number(result['ce_stderr'])} nats/token (standard error over documents)",
        "perplexity": number(result["perplexity"], 2),
        "bits per byte": number(result["bits_per_byte"]),
        "unigram CE": f"{result['unigram_ce']:.4f}",
        "bigram CE": f"{result['bigram_ce']:.4f} (interpolated)",
        "scored": f"{tokens}, {result['bytes']:,} bytes, {result['documents']:,} documents",
        "parameters": f"{result['parameters']:,}",
        "KV cache": f"{result['cache_bytes_per_token']:,} bytes/token, {result['cache_percent_of_mha']:.1f} % of MHA",
        "trained on": f"{result['train_tokens']:,} tokens, {result['train_flops']:.3g} FLOPs",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def number(value: float | None, digits: int = 4) -> str:
    """A number, or n/a where there is none."""
    return "n/a" if value is None else f"{value:.{digits}f}"
