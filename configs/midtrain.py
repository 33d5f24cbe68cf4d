"""Mid-training at the paper's 128M scale: chats and questions, of which the answers are learned.

    python train.py --config configs/midtrain.py --init-from runs/lrkv_128m-lrkv --data.path DIR
                                                             LRKV; :mha :gqa :mqa :mla for the others, each from its own

The mixture that the paper names, one example a line (lrkv_jax/data/chat.py). Nothing is downloaded: DIR holds

    smoltalk.jsonl   460,000 chats, `messages` as published                         taken once
    mmlu.jsonl       100,000 questions, the auxiliary train split of MMLU           once
    gsm8k.jsonl        8,000 word problems, the train split of GSM8K                four times, 32,000

the latter two as {"prompt": question, "completion": answer}; several files, or a folder, may begin with one of these
names. The paper gives no proportions. These counts are ours, and tuned for nothing: without them one example in seventy
would be a word problem. A missing part is refused. For other files --data.repeats takes other patterns, or none.

What `--dry-run` prints; the paper gives no cross-entropy after mid-training, nor its rates, which here are a tenth of
those of its pretraining and tuned for nothing:

               parameters  cache bytes/token  % of MHA  training FLOPs            CE
    lrkv      156,340,224             19,680      53.4       3.056e+17             -
    mha       162,201,600             36,864     100.0       3.172e+17             -
    gqa       155,123,712             18,432      50.0       3.032e+17             -
    mqa       150,405,120              6,144      16.7        2.94e+17             -
    mla       155,713,536              4,896      13.3        3.23e+17             -

10,000 steps of 32,768 tokens. How many steps are an epoch is for `python -m lrkv_jax.prepare` to say, which takes the
same flags: its records over the batch of 16. Hardware and time, from the FLOPs and not from a run: 0.48 chip-hours for
MHA on TPU v5p at 40 % of 459 TFLOP/s.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.recipes import TOKENS_PER_BATCH, paper

pretrained = paper(layers=12, width=768, tokens=1e4 * TOKENS_PER_BATCH)
base = RunConfig(
    model=pretrained.model,
    data=DataConfig(
        dataset="sft",
        context=pretrained.data.context,
        repeats=("smoltalk*=1", "mmlu*=1", "gsm8k*=4"),
        validation_percent=1.0,
        test_percent=1.0,
    ),
    optimizer=OptimizerConfig(
        name="muon",
        peak_lr=0.002,
        embed_lr=0.02,
        unembed_lr=0.0004,
        weight_decay=0.0,
        schedule="cosine",
        warmup_steps=100,
    ),
    train=pretrained.train.model_copy(update={"eval_every": 500}),
    checkpoint=pretrained.checkpoint,
)
heads = {"heads": 6, "head_dim": 128}
configs = {
    "lrkv": base.with_attention(lrkv.Config(**heads, rank=46)),
    "mha": base.with_attention(gqa.Config(**heads)),
    "gqa": base.with_attention(gqa.Config(**heads, kv_heads=3)),
    "mqa": base.with_attention(gqa.Config(**heads, kv_heads=1)),
    "mla": base.with_attention(mla.Config(**heads, latent=128)),
}
