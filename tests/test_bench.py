"""The speed measurement: its arithmetic, its report and its command line. Nothing here asserts a time."""

import json

import pytest

from lrkv_jax import bench
from lrkv_jax.settings import UserError


@pytest.fixture(scope="module")
def report():
    configs = bench.chosen(None, ["mha", "lrkv"], "float32")
    small = {
        name: config.model_copy(
            update={
                "model": config.model.model_copy(update={"layers": 1, "width": 16, "vocab": 32}),
                "data": config.data.model_copy(update={"context": 16}),
                "train": config.train.model_copy(update={"batch_size": 8}),
            }
        )
        for name, config in configs.items()
    }
    return bench.measure(small, rounds=2, steps=2)


def test_ratio_is_taken_within_rounds():
    """Fails if times of different rounds meet: the second round, ten times slower for both, must not matter."""
    assert bench.ratio([[2.0, 2.0, 9.0], [30.0], [2.0]], [[1.0], [10.0], [1.0]]) == 2.0


def test_report_counts_tokens_flops_and_shares(report):
    """Fails if a rate and the time it is taken from disagree, or MHA is not its own measure."""
    for row in report["rows"].values():
        assert row["tokens_per_s"] * row["step_ms"] / 1e3 == pytest.approx(8 * 16)
        assert row["flops_of_product"] == pytest.approx(row["flops"] / report["product_flops"])
        low, high = row["step_ms_quartiles"]
        assert low <= row["step_ms"] <= high
    assert report["rows"]["mha"]["step_of_mha"] == 1.0
    assert report["dtype"] == "float32"


def test_table_shows_every_family(report):
    """Fails if a column is missing, or the report is no JSON."""
    assert json.loads(json.dumps(report))["rows"].keys() == {"mha", "lrkv"}
    lines = bench.table(report).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["mha", "lrkv"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_standard_shape_is_the_one_of_the_figures():
    """Fails if a default elsewhere changes the shape that all published figures refer to."""
    configs = bench.standard()
    assert set(configs) == {"mha", "gqa", "mqa", "mla", "lrkv"}
    for config in configs.values():
        model = config.model
        assert (model.layers, model.width, model.hidden, model.vocab) == (6, 256, 1024, 4096)
        assert (config.attention.heads, config.attention.head_dim, config.data.context) == (4, 64, 256)
        assert (config.train.batch_size, config.optimizer.name, model.dtype) == (16, "adamw", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--families", "mamba"], "--families mamba: have mha, gqa, mqa, mla, lrkv"),
        (["train", "--rounds", "0"], "'0' is not a whole number from 1 up"),
        (["train", "--dtype", "float16"], "float16"),
        (["train", "--round", "3"], "unrecognized arguments: --round 3"),
        (["train", "--config", "nowhere.py"], "no file nowhere.py"),
        (["train", "--config", "configs/debug.py:lrkv", "--families", "mha"], "already names one"),
        (["train", "--json", "nowhere/bench.json"], "--json nowhere/bench.json"),
        ([], "required: train"),
    ],
)
def test_bad_input_ends_in_one_line(arguments, message, monkeypatch, capsys):
    """Fails if a mistake shows a traceback or a usage text, or is only found after minutes of measuring."""
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured before the flags were checked"))
    with pytest.raises(SystemExit) as stop:
        bench.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_mixed_dtypes_are_refused(monkeypatch):
    """Fails if float32 and bfloat16 steps stand in one table with one rate of the product."""
    configs = bench.standard()
    float32 = configs["mha"].model.model_copy(update={"dtype": "float32"})
    monkeypatch.setattr(
        bench, "standard", lambda: configs | {"mha": configs["mha"].model_copy(update={"model": float32})}
    )
    with pytest.raises(UserError, match="give --dtype"):
        bench.chosen(None, None, None)
    assert {config.model.dtype for config in bench.chosen(None, None, "float32").values()} == {"float32"}
