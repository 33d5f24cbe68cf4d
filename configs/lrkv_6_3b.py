"""The paper's 6.3B scale: 32 layers, H = 32, D = 4096, context 2048, 50B tokens.

    python train.py --config configs/lrkv_6_3b.py            LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints, key scales of QK-norm counted, and the paper's final test cross-entropy to expect (nats/token):

               parameters  cache bytes/token  % of MHA  training FLOPs    CE (paper)
    lrkv    6,281,494,528            241,664      46.1       1.984e+21         2.288
    mha     6,854,541,312            524,288     100.0       2.156e+21         2.319
    gqa     5,847,908,352             32,768       6.2       1.854e+21         2.354
    mqa     5,814,353,920             16,384       3.1       1.844e+21         2.304
    mla     6,460,276,736             73,728      14.1       2.078e+21         2.377

Hardware and time, from the FLOPs and not from a run: 3,261 chip-hours for MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.recipes import paper

base = paper(layers=32, width=4096, tokens=50e9)
heads = {"heads": 32, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=54)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=2)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=1024)),
}
