"""The paper's training recipe (arXiv 2601.11471, section 5 of its set-up; see README, design choices), at any scale."""

from __future__ import annotations

from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.transformer import ModelConfig

TOKENS_PER_BATCH = 32_768  # as printed in the paper


def paper(*, layers: int, width: int, tokens: float, context: int = 2048) -> RunConfig:
    """FineWeb-Edu, vocabulary 50304, bfloat16; Muon 0.02, AdamW 0.2 and 0.004, decay 0.1, clip 1, cosine, 2000 warm-up.

    The attention stays the default: a config file sets it with `with_attention`.
    """
    steps = round(tokens / TOKENS_PER_BATCH)
    return RunConfig(
        model=ModelConfig(layers=layers, width=width, vocab=50304, dtype="bfloat16", scan_layers=True, remat="full"),
        data=DataConfig(
            dataset="huggingface:HuggingFaceFW__fineweb-edu/sample-100BT",
            context=context,
            # About ten million tokens each of a hundred billion: the error over documents is small, scoring quick.
            validation_percent=0.01,
            test_percent=0.01,
        ),
        optimizer=OptimizerConfig(
            name="muon",
            peak_lr=0.02,
            embed_lr=0.2,
            unembed_lr=0.004,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            schedule="cosine",
            warmup_steps=2000,
        ),
        train=TrainConfig(
            steps=steps, batch_size=TOKENS_PER_BATCH // context, loss_chunks=8, eval_every=2000, eval_windows=2048
        ),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
