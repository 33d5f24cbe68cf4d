"""The paper's 1.2B scale: 36 layers, H = 12, D = 1536, context 2048, 50B tokens.

The paper's table prints 24 layers, which would be 834M; 36 give its 1.17B.

    python train.py --config configs/lrkv_1_2b.py            LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints, key scales of QK-norm counted, and the paper's final test cross-entropy to expect (nats/token):

               parameters  cache bytes/token  % of MHA  training FLOPs    CE (paper)
    lrkv    1,091,358,720            108,288      49.0       3.722e+20         2.509
    mha     1,173,749,760            221,184     100.0       3.969e+20         2.530
    gqa     1,060,503,552             73,728      33.3       3.629e+20         2.536
    mqa     1,018,036,224             18,432       8.3       3.502e+20         2.573
    mla     1,092,354,048             24,768      11.2       3.895e+20         2.564

Hardware and time, from the FLOPs and not from a run: 600 chip-hours for MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.recipes import paper

base = paper(layers=36, width=1536, tokens=50e9)
heads = {"heads": 12, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=51)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=4)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=256)),
}
