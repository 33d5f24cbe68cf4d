"""The default: minutes on two CPU cores, on the Python standard library's own source files.

    python train.py                                         LRKV
    python train.py --config configs/tiny.py:mha            or :gqa :mqa :mla

What `--dry-run` prints, and the final test cross-entropy to expect (nats/token, mean of the seeds in results/tiny/):

               parameters  cache bytes/token  % of MHA  training FLOPs            CE
    lrkv        3,225,600              3,424      55.7        3.62e+13         3.980
    mha         3,342,336              6,144     100.0       3.769e+13         3.977
    gqa         3,194,880              3,072      50.0        3.58e+13         3.999
    mqa         3,096,576              1,024      16.7       3.455e+13         4.024
    mla         3,207,168                864      14.1       3.722e+13         4.037

float32, since the speed of bfloat16 differs between laptop CPUs. The rates are the paper's for Muon, its embedding rate
lowered to the matrices'; they were tuned for no family. Two cores of a shared cloud CPU: 5 to 8 minutes.
"""

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
