"""A few seconds, for tests: eighty short documents, a model of a few thousand parameters.

    python train.py --config configs/debug.py               LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints; the cross-entropy after eight steps means nothing (about 5.9 nats/token, the vocabulary's
logarithm being 6.2). Any CPU.

               parameters  cache bytes/token  % of MHA  training FLOPs            CE
    lrkv           53,184                240      93.8       4.774e+08             -
    mha            53,248                256     100.0       4.782e+08             -
    gqa            55,296                256      50.0       5.285e+08             -
    mqa            52,224                128      50.0       4.656e+08             -
    mla            52,992                112      43.8       4.813e+08             -
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.transformer import ModelConfig

base = RunConfig(
    model=ModelConfig(layers=2, width=32, vocab=512, scan_layers=True),
    data=DataConfig(dataset="text_files", path="tests/text.jsonl", context=32, record_tokens=128),
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
