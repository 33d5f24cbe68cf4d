"""The paper's rank ablation at a quarter of its width, same ratios: both of its figures, from our own runs.

    python -m lrkv_jax.sweep configs/study.py                       all of it; resumes, skips what is done
    python train.py --config configs/study.py:lrkv-r12-shared       one run of it
    python -m lrkv_jax.figures results/study --out figures          figures 1 to 4, a table, every number as CSV

H=6, C=32, D=192, 6 layers, context 256, 4.1M tokens of the standard library's source with its tests, vocabulary 4096.
R = 12, L and K stand to C, D and H nearly as the paper's do (46/128, 128/768, 3/6), so that shares of the cache are
about the paper's, before QK-norm's scales and the rotary key. 41 runs of 3.9 to 4.4M parameters, each about ten minutes
on one core of a shared cloud CPU in bfloat16.

Rates: Muon's was chosen among three for each of the five families (configs/study_rates.py, results/study_rates/), the
embedding's is lowered from the paper's 0.2 to 0.02, since each token is seen far more rarely.
Expected: docs/fidelity.md.
"""

from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.study import FAMILY, Comparison, Stage, Study, match_parameters
from lrkv_jax.transformer import ModelConfig

base = RunConfig(
    model=ModelConfig(layers=6, width=192, vocab=4096, dtype="bfloat16"),
    data=DataConfig(dataset="python_stdlib/with_tests", context=256),
    optimizer=OptimizerConfig(
        name="muon", peak_lr=0.02, embed_lr=0.02, unembed_lr=0.004, weight_decay=0.1, schedule="cosine", warmup_steps=50
    ),
    train=TrainConfig(steps=1000, batch_size=16, eval_every=50, eval_windows=128),
    checkpoint=CheckpointConfig(every_steps=250),
)
heads = {"heads": 6, "head_dim": 32}
attentions = {
    "mha": gqa.Config(**heads),
    "gqa3": gqa.Config(**heads, kv_heads=3),
    "mqa": gqa.Config(**heads, kv_heads=1),
    **{f"mla-l{latent}": mla.Config(**heads, latent=latent) for latent in (32, 48, 96)},
    **{f"lrkv-r{rank}": lrkv.Config(**heads, rank=rank) for rank in (12, 2, 4, 8, 16, 32)},
    "lrkv-r12-shared": lrkv.Config(**heads, rank=12, rope_mode="shared"),
    "lrkv-r12-latent": lrkv.Config(**heads, rank=12, rope_mode="latent"),
    # Controls: is it the partial rotation that helps `shared`, or the wider score?
    "mha-half": gqa.Config(**heads, rotary_dim=16),
    "gqa3-half": gqa.Config(**heads, kv_heads=3, rotary_dim=16),
    "mha-c44": gqa.Config(heads=6, head_dim=44),
}
runs = {name: base.with_attention(attention) for name, attention in attentions.items()}
swapped = tuple(runs)
five = ("mha", "gqa3", "mqa", "mla-l32", "lrkv-r12")
controls = ("mha-half", "gqa3-half", "mha-c44")
modes = ("lrkv-r12-shared", "lrkv-r12-latent", *controls)
matched = {f"{name}-matched": match_parameters(runs[name], runs["mha"]) for name in five[1:]}
runs |= matched

study = Study(
    runs=runs,
    stages=(
        Stage("one seed of the five families", five),
        Stage("where rotation acts, and the controls", modes),
        Stage("ranks and latents", tuple(name for name in swapped if name not in five + modes)),
        Stage("three seeds of the five families", five, seeds=(1, 2)),
        Stage("three seeds of the modes and controls", modes, seeds=(1, 2)),
        Stage("as many parameters as MHA", tuple(matched)),
    ),
    comparisons=(
        Comparison("as the paper compares, only the family swapped", tuple(n for n in swapped if n not in controls)),
        Comparison(
            "how many dimensions rotate, and how wide a score is",
            (*five, *modes),
            differ=(*FAMILY, "attention.rotary_dim", "attention.head_dim"),
        ),
        Comparison(
            "as many parameters as MHA",
            ("mha", *matched),
            differ=(*FAMILY, "model.mlp_width"),
            matched="parameters",
        ),
    ),
    labels={
        "mha": "MHA",
        "gqa3": "GQA-3",
        "mqa": "MQA",
        "lrkv-r12-shared": "LRKV R=12, shared",
        "lrkv-r12-latent": "LRKV R=12, latent",
        "mha-half": "MHA, half rotary",
        "gqa3-half": "GQA-3, half rotary",
        "mha-c44": "MHA, C=44",
        **{f"mla-l{latent}": f"MLA L={latent}" for latent in (32, 48, 96)},
        **{f"lrkv-r{rank}": f"LRKV R={rank}" for rank in (2, 4, 8, 12, 16, 32)},
        "gqa3-matched": "GQA-3, wider MLP",
        "mqa-matched": "MQA, wider MLP",
        "mla-l32-matched": "MLA L=32, wider MLP",
        "lrkv-r12-matched": "LRKV R=12, wider MLP",
    },
    seed_sd=0.012,  # results/tiny: 0.006 to 0.012 over three seeds of each family
)
configs = study.runs
