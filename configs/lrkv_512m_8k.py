"""The paper's 512M scale at context 8192: 12 layers, H = 12, D = 1536, 50B tokens.

The paper's table prints 24 layers; 12 give its 494M.

    python train.py --config configs/lrkv_512m_8k.py            LRKV; :mha :gqa :mqa :mla for the others

What `--dry-run` prints, key scales of QK-norm counted, and the paper's final test cross-entropy to expect (nats/token):

               parameters  cache bytes/token  % of MHA  training FLOPs    CE (paper)
    lrkv      466,808,832             36,096      49.0       2.075e+20         2.665
    mha       494,272,512             73,728     100.0       2.157e+20         2.740
    gqa       456,523,776             24,576      33.3       2.044e+20         2.704
    mqa       442,368,000              6,144       8.3       2.001e+20         2.728
    mla       467,140,608              8,256      11.2       2.302e+20         2.714

Hardware and time, from the FLOPs and not from a run: 326 chip-hours for MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.recipes import paper

base = paper(layers=12, width=1536, tokens=50e9, context=8192)
heads = {"heads": 12, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=51)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=4)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=256)),
}
