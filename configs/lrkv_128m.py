"""The paper's 128M scale: 12 layers, H = 6, D = 768, context 2048, 100B tokens.

    python train.py --config configs/lrkv_128m.py            LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints, key scales of QK-norm counted, and the paper's final test cross-entropy to expect (nats/token):

               parameters  cache bytes/token  % of MHA  training FLOPs    CE (paper)
    lrkv      156,340,224             19,680      53.4       9.327e+19         2.893
    mha       162,201,600             36,864     100.0       9.679e+19         2.903
    gqa       155,123,712             18,432      50.0       9.254e+19         2.918
    mqa       150,405,120              6,144      16.7       8.971e+19         2.929
    mla       155,713,536              4,896      13.3       9.856e+19         2.901

Hardware and time, from the FLOPs and not from a run: 146 chip-hours for MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.recipes import paper

base = paper(layers=12, width=768, tokens=100e9)
heads = {"heads": 6, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=46)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=3)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=128)),
}
