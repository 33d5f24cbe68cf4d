"""HEADER"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.transformer import ModelConfig

base = RunConfig(
    model=ModelConfig(layers=4, width=192, vocab=4096, dtype="float32"),
    data=DataConfig(dataset="python_stdlib", context=256),
    optimizer=OptimizerConfig(
        name="muon", peak_lr=0.02, embed_lr=0.02, unembed_lr=0.004, weight_decay=0.1, schedule="cosine", warmup_steps=32
    ),
    train=TrainConfig(steps=520, batch_size=16, eval_every=130, eval_windows=128),
    checkpoint=CheckpointConfig(every_steps=130),
)
heads = {"heads": 6, "head_dim": 32}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=12)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=3)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=32)),
}
