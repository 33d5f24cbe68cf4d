"""Hugging Face checkpoints in and out: the same logits, the same bits, and one line for what can't be taken in."""

import json

import hf_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hf_models import BEGIN, END, LOGITS, MODELS, SHOWN, TOKENS
from safetensors.numpy import load_file

from lrkv_jax import handover, rundir
from lrkv_jax.accounting import accounts, textless_program
from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.hf.__main__ import give_out, main, take_in, trained
from lrkv_jax.settings import UserError, command
from lrkv_jax.transformer import ModelConfig

TEXT = ["--data.dataset", "text_files", "--data.path", "tests/text.jsonl", "--data.context", "32"]
HEADS = {"heads": 4, "head_dim": 6}
# What no Llama or Qwen is, and the field that says so.
OWN = {
    "lrkv": (lrkv.Config(**HEADS, kv_heads=2, rank=3, qkv_bias=True), {}, "attention.family = lrkv"),
    "lrkv by layer": (lrkv.Config(**HEADS, rank=3, ranks=(1, 3)), {}, "attention.family = lrkv"),
    "mla": (mla.Config(**HEADS, latent=5, rotary_dim=4), {}, "attention.family = mla"),
    "relu2": (gqa.Config(**HEADS), {}, "model.mlp = relu2"),
    "capped": (
        gqa.Config(**HEADS, qk_norm=False),
        {"mlp": "swiglu", "norm_gain": True, "embed_norm": False},
        "softcap",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own, for tokenized text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LRKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a checkpoint by the model's name, and the run directory it was imported into."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            take_in(hf_models.save(name, folder / "hf"), folder / "run", TEXT)
            made[name] = folder / "hf", folder / "run"
        return made[name]

    return get


def load(run_dir):
    """A run directory's config, and its parameters by name."""
    config = RunConfig.load(run_dir)
    params = trained(run_dir, config, "newest")[1]
    return config, {name: np.asarray(param.get_value()) for name, param in handover.by_name(params).items()}


def logits(run_dir):
    """[2, T, V], in float32."""
    config = RunConfig.load(run_dir)
    model = nnx.merge(textless_program(config).graph, trained(run_dir, config, "newest")[1])
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
    return np.asarray(jax.jit(model)(jnp.asarray(TOKENS), positions))


def same(ours, theirs):
    """Whether two dicts of arrays hold the same bits under the same names."""
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(checkpoint, name):
    """Bug: a transposed map, halves of a head swapped, a gain after rotation, a frequency scaled otherwise, an epsilon
    or a bias lost: whatever makes another model of the same tensors."""
    with np.load(LOGITS) as golden:
        np.testing.assert_allclose(logits(checkpoint(name)[1])[..., ::SHOWN], golden[name], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_came_from_there_goes_back_bit_for_bit(checkpoint, tmp_path, name):
    """Bug: a tensor is written as its memory lies and not as its strides say; a tied one is written twice, or an
    untied one not at all; a field of config.json doesn't come back."""
    source, run_dir = checkpoint(name)
    give_out(run_dir, tmp_path / "hf", "newest", "float32", 10**9)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), hf_models.weights(name))
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    take_in(tmp_path / "hf", tmp_path / "run", TEXT)
    (config, params), (again, back) = load(run_dir), load(tmp_path / "run")
    assert (config.model, config.attention) == (again.model, again.attention)
    assert same(params, back)


def test_a_run_directory_like_any_other(checkpoint):
    """Bug: what eval.py, generate and --init-from read of a run directory isn't there: the corpus that flags have
    named, begin and end as config.json has them, a checkpoint at step 0."""
    _, run_dir = checkpoint("llama")
    config = RunConfig.load(run_dir)
    assert (config.family, config.data.begin_token, config.data.end_token) == ("llama", BEGIN, END)
    store = rundir.open_corpus(run_dir, config)
    assert store.counts("test").documents > 0
    assert store.tokenizer.end_id == 257
    assert trained(run_dir, config, "newest")[2] == 0


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_bfloat16_in_shards(checkpoint, tmp_path, name):
    """Bug: a shard is lost or its index names another; tensors keep float32, or are rounded twice; the model computes
    in another dtype than the checkpoint says; others may read all files but the tensors'."""
    give_out(checkpoint(name)[1], tmp_path / "hf", "newest", "bfloat16", 3000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(path.name for path in tmp_path.glob("hf/*.safetensors")) == files
    assert len({path.stat().st_mode for path in tmp_path.glob("hf/*")}) == 1
    held = {key: tensor for file in files for key, tensor in load_file(tmp_path / "hf" / file).items()}
    rounded = {key: tensor.astype(ml_dtypes.bfloat16) for key, tensor in hf_models.weights(name).items()}
    assert same(held, rounded)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in rounded.values())

    take_in(tmp_path / "hf", tmp_path / "run", TEXT)
    config, params = load(tmp_path / "run")
    assert config.model.dtype == "bfloat16"
    exact = load(checkpoint(name)[1])[1]
    assert same(params, {key: value.astype(ml_dtypes.bfloat16).astype(np.float32) for key, value in exact.items()})


def own_run(folder, attention, **model):
    """The run directory of a model with random parameters, gains and biases included, and the parameters by name."""
    data = DataConfig(
        dataset="text_files", path="tests/text.jsonl", context=32, begin_token=BEGIN, end_token=END, document_mask=True
    )
    model = ModelConfig(layers=2, width=24, vocab=263, **model)
    config = RunConfig(family="mine", model=model, attention=attention, data=data)
    leaves, tree = jax.tree.flatten(textless_program(config).abstract_params())
    rng = np.random.default_rng(0)
    params = jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32) for leaf in leaves])
    hf_models.tokenizer().save(folder.parent / "tokenizer.json")
    handover.write_run(folder, config, params, folder.parent / "tokenizer.json")
    return folder, {name: np.asarray(param.get_value()) for name, param in handover.by_name(params).items()}


@pytest.mark.parametrize("name", OWN)
def test_our_own_models_come_back_bit_for_bit(tmp_path, capsys, name):
    """Bug: a model that is no Llama is written as one all the same, without a word, or without what only it has; a
    tensor is on no page; what pads layers of a lower rank is counted as parameters."""
    attention, model, reason = OWN[name]
    run_dir, params = own_run(tmp_path / "run", attention, **model)
    give_out(run_dir, tmp_path / "out", "newest", "float32", 10**9)
    assert reason in capsys.readouterr().err
    page = (tmp_path / "out" / "README.md").read_text()
    config = RunConfig.load(run_dir)
    for tensor in params:
        assert f"| {tensor} | {list(params[tensor].shape)} | [" in page
        assert not page.split(f"| {tensor} | ")[1].split("\n")[0].endswith("|  |"), tensor

    assert f"{accounts(config).parameters:,} parameters" in take_in(tmp_path / "out", tmp_path / "back", [])
    again, back = load(tmp_path / "back")
    assert same(params, back)
    assert again.model_copy(update={"data": config.data}) == config
    assert again.data.document_mask


def test_adapters_are_merged(tmp_path):
    """Bug: what is exported is the base model, without what fine-tuning has learned."""
    run_dir, params = own_run(tmp_path / "run", gqa.Config(**HEADS), lora_rank=2)
    give_out(run_dir, tmp_path / "out", "newest", "float32", 10**9)
    held, at = load_file(tmp_path / "out" / "model.safetensors"), "blocks.attention.w_o"
    learned = np.einsum("nhcr,nrd->nhcd", params[f"{at}.lora.a"], params[f"{at}.lora.b"]) * 16 / 2
    np.testing.assert_allclose(held[f"{at}.w"], params[f"{at}.w"] + learned, atol=1e-5)
    assert not [name for name in held if "lora" in name]


def without(name):
    """The Llama's tensors but one."""
    return {key: tensor for key, tensor in hf_models.weights("llama").items() if key != name}


NORM = "model.layers.1.input_layernorm.weight"
FAULTS = {
    "architecture": ({"model_type": "gpt2"}, "model_type = 'gpt2' can't be imported; these can: llama, qwen2, qwen3"),
    "scaling": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_type = 'yarn' can't be imported; these can: default, linear, llama3",
    ),
    "scaling in part": ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' lacks low_freq_factor"),
    "scaling by layer": ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "one object for all layers"),
    "window": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has full_attention, sliding"),
    "bias": ({"attention_bias": True}, "attention_bias = True can't be imported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' can't be imported, only 'silu'"),
    "key": ({"hidden_size": None}, "hidden_size = None must be a positive whole number"),
    "heads": ({"num_key_value_heads": 3}, "kv_heads = 3: must divide heads = 4"),
    "missing": ({"tensors": without(NORM)}, f"no tensor {NORM}"),
    "strange": ({"tensors": without("") | {"score.weight": np.zeros(3)}}, "tensor score.weight has no place in this"),
    "shape": ({"intermediate_size": 23}, "is [24, 22], config.json says [24, 23] (and 5 more)"),
    "dtype": ({"tensors": without(NORM) | {NORM: np.zeros(24, np.int8)}}, f"{NORM} in model.safetensors is I8"),
    "vocabulary": ({"vocab_size": 200, "tensors": {}}, "(and 20 more)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_can_not_be_taken_in_is_told_in_a_line(tmp_path, monkeypatch, capsys, fault):
    """Bug: a model that ours is not is imported all the same, the fault is a traceback, or half a run is left."""
    changed, says = FAULTS[fault]
    folder = hf_models.save("llama", tmp_path / "hf", **changed)
    check_refused(folder, tmp_path / "runs" / "out", says, monkeypatch, capsys)


def check_refused(folder, out, says, monkeypatch, capsys, *flags):
    out.parent.mkdir(exist_ok=True)
    monkeypatch.setattr("sys.argv", ["hf", "import", str(folder), str(out), *TEXT, *flags])
    with pytest.raises(SystemExit) as left:
        command(main)()
    lines = capsys.readouterr().err.strip().splitlines()
    assert left.value.code == 2
    assert len(lines) == 1
    assert says in lines[0]
    assert not list(out.parent.iterdir())


def test_damaged_files_are_told_in_a_line(checkpoint, tmp_path, monkeypatch, capsys):
    """Bug: a download that was cut, or a file that is missing, ends in a traceback, or in a model of random weights."""
    folder, runs = tmp_path / "hf", tmp_path / "runs"
    give_out(checkpoint("llama")[1], folder, "newest", "float32", 3000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    for kept in (len(content) - 1, len(content) // 2, 5):
        shard.write_bytes(content[:kept])
        check_refused(folder, runs / "out", f"{shard}: cut short", monkeypatch, capsys)
    shard.unlink()
    check_refused(folder, runs / "out", f"{shard}: no such file", monkeypatch, capsys)
    (folder / "model.safetensors.index.json").unlink()
    check_refused(folder, runs / "out", "has neither model.safetensors nor", monkeypatch, capsys)
    (folder / "tokenizer.json").unlink()
    check_refused(folder, runs / "out", "tokenizer.json: No such file", monkeypatch, capsys)
    (folder / "config.json").write_text("{")
    check_refused(folder, runs / "out", "config.json: not JSON", monkeypatch, capsys)


def test_flags_choose_the_text_and_not_the_model(checkpoint, tmp_path, monkeypatch, capsys):
    """Bug: a flag makes another model than the checkpoint's, or fails late and leaves half a run; an existing folder
    is written into."""
    folder, run_dir = checkpoint("llama")
    for flags, says in [
        (["--model.layers", "3"], "model.layers = 3: the checkpoint has 2"),
        (["--attention.rope-base", "7"], "attention.rope_base = 7.0: the checkpoint has 100.0"),
        (["--data.end-token", "<eos>"], "data.end_token = '<eos>'"),
        (["--data.path", "/nowhere"], "/nowhere"),
        (["--wat", "1"], "--wat: no such flag"),
    ]:
        check_refused(folder, tmp_path / "runs" / "out", says, monkeypatch, capsys, *flags)
    with pytest.raises(UserError, match="run exists; name a folder that doesn't"):
        take_in(folder, run_dir, TEXT)
    assert RunConfig.load(run_dir).model.layers == 2


@pytest.mark.parametrize("name", MODELS)
def test_transformers_itself(checkpoint, tmp_path, name):
    """Bug: hf_logits.npz is of other models than these; what we write is read otherwise by transformers."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source, run_dir = checkpoint(name)
    expected = hf_models.theirs(source)
    with np.load(LOGITS) as golden:
        np.testing.assert_allclose(golden[name], expected[..., ::SHOWN], atol=1e-5)
    np.testing.assert_allclose(logits(run_dir), expected, atol=1e-4)
    give_out(run_dir, tmp_path / "hf", "newest", "float32", 3000)
    np.testing.assert_array_equal(hf_models.theirs(tmp_path / "hf"), expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("a\n\u00e9").input_ids == hf_models.tokenizer().encode("a\n\u00e9")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
