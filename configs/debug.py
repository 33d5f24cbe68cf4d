"""HEADER"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.transformer import ModelConfig

base = RunConfig(
    model=ModelConfig(layers=2, width=32, vocab=512, scan_layers=True),
    data=DataConfig(dataset="text_files", path="README.md", context=32, record_tokens=128),
    optimizer=OptimizerConfig(name="adamw", peak_lr=3e-3, warmup_steps=2),
    train=TrainConfig(steps=8, batch_size=8, loss_chunks=2, eval_every=4, eval_windows=16),
    checkpoint=CheckpointConfig(every_steps=2),
)
heads = {"heads": 2, "head_dim": 8}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=3)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(heads=4, head_dim=8, kv_heads=2)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=8)),
}
