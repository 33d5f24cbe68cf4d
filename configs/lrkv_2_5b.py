"""The paper's 2.5B scale: 36 layers, H = 18, D = 2304, context 2048, 50B tokens.

The paper's table prints 18 layers; its size and its figures say 36.

    python train.py --config configs/lrkv_2_5b.py            LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints, key scales of QK-norm counted, and the paper's final test cross-entropy to expect (nats/token):

               parameters  cache bytes/token  % of MHA  training FLOPs    CE (paper)
    lrkv    2,337,417,216            163,584      49.3       7.684e+20         2.376
    mha     2,525,036,544            331,776     100.0       8.247e+20         2.389
    gqa     2,270,232,576            110,592      33.3       7.482e+20         2.397
    mqa     2,164,064,256             18,432       5.6       7.164e+20         2.408
    mla     2,339,241,984             34,848      10.5       7.944e+20         2.392

Hardware and time, from the FLOPs and not from a run: 1,248 chip-hours for MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.recipes import paper

base = paper(layers=36, width=2304, tokens=50e9)
heads = {"heads": 18, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=55)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=6)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=384)),
}
