"""The command for the lm-evaluation-harness: on tasks in a folder, where the harness is; its refusals everywhere."""

import functools
import json

import jax
import pytest
from models import FAMILIES

from lrkv_jax import lm_eval as ours
from lrkv_jax import sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig, Tokenizer
from lrkv_jax.likelihood import Scorer, continued, document
from lrkv_jax.settings import UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Tokens, make_program
from lrkv_jax.transformer import ModelConfig
from lrkv_jax.until import Wanted

BEGIN, END = "<begin>", "<end>"
CHOICES = [
    {"question": "ab cd ", "choices": ["ab", "zz", "cd cd"], "answer": 0},
    {"question": "", "choices": ["cd", "b"], "answer": 1},
    {"question": "ab " * 30, "choices": ["a", "ab", "c"], "answer": 2},
]
OPEN = [{"question": question, "answer": "a"} for question in ("ab", "cd cd", "x" * 50)]
PAGES = [{"page": page} for page in ("ab cd\n", "größer → " * 9, "z")]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run directory of an untrained model, its adapters unlike zero, and no corpus anywhere."""
    pytest.importorskip("lm_eval")
    path = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer.train(["ab cd"], 258, BEGIN, END)  # a token a byte
    tokenizer.save(path / "tokenizer.json")
    config = RunConfig(
        model=ModelConfig(layers=1, width=16, vocab=258, scan_layers=True, lora_rank=1),
        attention=FAMILIES["lrkv"],
        data=DataConfig(dataset="text_files", path="/gone", context=32, begin_token=BEGIN, end_token=END),
    )
    (path / "config.json").write_text(config.model_dump_json())
    tokens = Tokens(tokenizer.begin_id, tokenizer.end_id, False)
    program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    params = jax.jit(program.init_params)(jax.random.key(0))
    checkpoints = Checkpointer(path, config.checkpoint)
    checkpoints.save(3, {"params": jax.tree.map(lambda leaf: 2 * leaf + 0.02, params)})
    checkpoints.close()
    return path


@pytest.fixture
def model(run_dir, monkeypatch):
    """The run, loaded onto one device."""
    one = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda config: one)
    return ours.load(run_dir, "newest")


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task of each kind of request; the harness forgets its own, which take it long to list."""
    from lm_eval import tasks as harness

    monkeypatch.setattr(harness, "TaskManager", functools.partial(harness.TaskManager, include_defaults=False))
    means = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "exact_match")]
    bits = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
    write_task(
        tmp_path,
        "choices",
        CHOICES,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=means[:1],
    )
    write_task(
        tmp_path,
        "open",
        OPEN,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="answer",
        generation_kwargs={"until": ["\n", "a"], "max_gen_toks": 20},
        metric_list=means[1:],
    )
    write_task(
        tmp_path,
        "pages",
        PAGES,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
        metric_list=[bits],
    )
    return tmp_path


def write_task(folder, name, documents, **fields):
    """A task file of the harness, and its documents as JSONL beside it."""
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    kwargs = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
    task = {"task": f"own_{name}", "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test", **fields}
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML too


def test_tasks_of_every_kind(model, run_dir, tasks, capsys):
    """Bugs: a sign, an order of requests or a cut that the harness understands otherwise; adapters left out; results
    that don't reach the table or the file."""
    out = tasks / "out.json"
    arguments = ["--tasks", "own_c*,own_open,own_pages", "--include-path", str(tasks), "--batch-size", "4"]
    assert ours.main([str(run_dir), *arguments, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    context = {"context": 32, "rows": 4, "step": 3}
    assert context.items() <= found["config"].items()

    scorer = Scorer(model.program, model.params, model.mesh, batch=8, context=32, vocab=258)
    right = 0
    for question in CHOICES:
        texts = [continued(model.tokenizer, question["question"], choice) for choice in question["choices"]]
        nats = [score.nats for score in scorer.score(texts)]
        right += nats.index(min(nats)) == question["answer"]
    assert found["results"]["own_choices"]["acc,none"] == pytest.approx(right / len(CHOICES))
    pages = [page["page"] for page in PAGES]
    nats = sum(score.nats for score in scorer.score([document(model.tokenizer, page) for page in pages]))
    bits = nats / sum(len(page.encode()) for page in pages) / 0.6931471805599453
    assert found["results"]["own_pages"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert found["results"]["own_open"]["exact_match,none"] == 0
    assert found["config"]["contexts cut from the left"] == len(CHOICES[2]["choices"])
    assert found["config"]["prompts cut from the left"] == 1
    assert found["config"]["continuations limited to half the context"] == len(OPEN)
    printed = capsys.readouterr().out
    assert f"|own_pages  |Yaml   |none  |     0|bits_per_byte|↓  |{bits:.4f}" in printed
    assert "prompts cut from the left: 1 (data.context = 32)" in printed

    with pytest.raises(UserError, match=r"--tasks nothing: no such task"):
        ours.main([str(run_dir), "--tasks", "nothing", "--include-path", str(tasks)])


def test_requests_go_where_they_belong(model):
    """Bugs: contexts and options change places; log p without its sign; a writer made anew for each call."""
    from lm_eval.api.instance import Instance

    adapter = ours.HarnessModel(model, 4)

    def request(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    pairs = [("ab", " cd"), ("", "x")]
    found = adapter.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    scored = adapter.scorer.score([continued(model.tokenizer, *pair) for pair in pairs])
    assert found == [(-score.nats, score.greedy) for score in scored]
    assert all(log_p < 0 for log_p, _ in found)
    options = {"until": ["a"], "max_gen_toks": 6}
    texts = adapter.generate_until([request("generate_until", "ab", options)], disable_tqdm=True)
    writer = adapter.writer
    assert texts == writer.write(["ab"], [Wanted(("a",), 6)])
    assert adapter.writer is writer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: --tasks"),
        (["--tasks", "x", "--limit", "0"], "--limit 0: must be at least 1"),
        (["--tasks", "x", "--num-fewshot", "-1"], "--num-fewshot -1: must be at least 0"),
        (["--tasks", "x", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--tasks", "x", "--include-path", "/nowhere"], "--include-path /nowhere: is no folder"),
        (["--tasks", "x", "--out", "/nowhere/out.json"], "--out /nowhere/out.json: there is no folder /nowhere"),
        (["--tasks", "x"], "the lm-evaluation-harness is not installed (no module lm_eval): pip install lm-eval"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line(monkeypatch, capsys, arguments, says):
    """Bug: a traceback, or hours of work before what could be said at once."""
    monkeypatch.setattr(ours, "MISSING", "lm_eval")
    with pytest.raises(SystemExit) as end:
        command(lambda: ours.main(["/nowhere", *arguments]))()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {says}\n"


def test_data_that_cannot_be_had_is_told_in_one_line(model, monkeypatch):
    """Bug: without a network, the traceback of three libraries."""
    import lm_eval as harness

    options = ours.parse(["run", "--tasks", "arc_easy"])

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach it on the Hub\nand so on")

    monkeypatch.setattr(harness, "simple_evaluate", offline, raising=False)
    with pytest.raises(
        UserError, match=r"^--tasks arc_easy: a task's data can't be had: Couldn't reach it on the Hub$"
    ):
        ours.evaluate(ours.HarnessModel(model, 1), None, ["arc_easy"], options)
