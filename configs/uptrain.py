"""A converted model trained on: the MHA run of configs/study.py as LRKV at three cache budgets and GQA at two.

    python train.py --config configs/uptrain.py:lrkv-35 --init-from CONVERTED
    ... --distill-from ORIGINAL --train.distill-weight 0.5      the same, learning from the original too

CONVERTED is what `python -m lrkv_jax.convert ORIGINAL --cache-percent 35 --calibrate 65536 --out CONVERTED` leaves, and
ORIGINAL is runs/study/mha-s0. All of it: `python benchmarks/uptrain.py run runs/study/mha-s0 runs/uptrain`.

A tenth of the original's steps, 0.41M tokens, on the same corpus in another order, at a tenth of its rates, which fall
to zero; half of them made the original worse (docs/log.md). Another rank is a flag, `--attention.rank 6` (GQA:
`--attention.kv-heads`). For a model of another size leave --config out, since --init-from then takes the source's own,
and name the rates: `--optimizer.name muon --optimizer.peak-lr 0.002 --train.steps 100 ...`, a tenth of what it was
trained with.

What `--dry-run` prints, without a teacher, whose forward pass is about a third more; validation CE before and after:

                 parameters  cache bytes/token  % of MHA  training FLOPs            CE
    lrkv-50       4,003,584              2,208      47.9       9.356e+12   3.125 3.071
    lrkv-35       3,922,944              1,488      32.3       9.158e+12   3.346 3.145
    lrkv-25       3,874,560              1,056      22.9       9.039e+12   3.965 3.348
    gqa-50        4,005,888              2,304      50.0       9.362e+12   3.794 3.257
    gqa-33        3,932,160              1,536      33.3        9.18e+12   4.283 3.452
    mha           4,227,072              4,608     100.0       9.905e+12   3.033 3.022

Each about a minute on one core of a shared cloud CPU in bfloat16 when it is idle.
"""

from pathlib import Path
from runpy import run_path

from lrkv_jax.attention import gqa, lrkv
from lrkv_jax.checkpoint import CheckpointConfig

original = run_path(str(Path(__file__).with_name("study.py")))["runs"]["mha"]
base = original.model_copy(
    update={
        "optimizer": original.optimizer.model_copy(
            update={"peak_lr": 0.002, "embed_lr": 0.002, "unembed_lr": 0.0004, "warmup_steps": 10}
        ),
        "train": original.train.model_copy(update={"steps": 100, "eval_every": 20, "seed": 1}),
        "checkpoint": CheckpointConfig(every_steps=100),
    }
)
heads = {"heads": original.attention.heads, "head_dim": original.attention.head_dim}
configs = {
    "lrkv-50": base.with_attention(lrkv.Config(**heads, rank=9)),
    "lrkv-35": base.with_attention(lrkv.Config(**heads, rank=4)),
    "lrkv-25": base.with_attention(lrkv.Config(**heads, rank=1)),
    "gqa-50": base.with_attention(gqa.Config(**heads, kv_heads=3)),
    "gqa-33": base.with_attention(gqa.Config(**heads, kv_heads=2)),
    "mha": base,
}
