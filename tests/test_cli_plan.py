"""`stageloom plan`: what it prints and writes agrees, and wrong input gets one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
from concurrent.futures.process import BrokenProcessPool
from html import unescape
from pathlib import Path
from typing import Any, cast

import pytest

from command import Result, stageloom
from stageloom.cli.words import console
from stageloom.errors import StageloomError
from stageloom.plan.crew import Crew
from stageloom.plan.floors import Setup

SMALL = "plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch 16 --pp 4 --microbatch 1 --recompute none"


def run(words: str) -> Result:
    return stageloom(*words.split())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same plan on the screen and in each kind of file."""
    folder = tmp_path_factory.mktemp("plan")
    found: dict[str, str] = {}
    for ending in ("md", "html", "json"):
        result = run(f"{SMALL} -o {folder}/plan.{ending}")
        assert result.status == 0, result.err
        assert result.out.splitlines()[-1] == f"wrote {folder}/plan.{ending}"
        found["screen"] = result.out
        found[ending] = (folder / f"plan.{ending}").read_text(encoding="utf-8")
    return found


def test_screen_markdown_html_and_json_agree(files: dict[str, str]) -> None:
    data = json.loads(files["json"])
    best = data["plan"]
    text = re.sub(r"<[^>]+>", " ", unescape(files["html"]))
    for said in (files["screen"], files["md"], text):
        said = " ".join(said.replace("|", " ").split())
        for part in (
            f"step {best['seconds']:.4g} s",
            f"schedule {best['schedule']}",
            f"P = 4 ranks, M = {best['microbatches']} micro-batches of 1",
            f"bubble {100 * best['bubble']:.1f} %",
            f"memory {best['memory'] / 1e9:.1f} GB of {data['memory_limit'] / 1e9:.1f} GB",
            f"GPU-hours {data['gpu_hours']:,.0f} for 1 trillion tokens",
            f"tensor {best['layout']['tensor']} x pipeline 4 x data {best['layout']['data']}",
            *(one["why"] for one in data["alternatives"]),
            *(one["text"] for one in data["disagreements"]),
        ):
            assert part in said, part


def test_json_on_the_screen_is_the_file(files: dict[str, str]) -> None:
    result = run(f"{SMALL} --json")
    assert result.status == 0
    assert json.loads(result.out) == json.loads(files["json"])


def test_json_holds_what_a_step_is_made_of(files: dict[str, str]) -> None:
    data = json.loads(files["json"])
    assert sum(data["plan"]["parts"].values()) == pytest.approx(data["plan"]["seconds"], rel=1e-6)
    assert max(rank["total"] for rank in data["memory_by_rank"]) == pytest.approx(data["plan"]["memory"])
    for rank in data["memory_by_rank"]:
        assert sum(value for key, value in rank.items() if key != "total") == pytest.approx(rank["total"])
    assert sum(data["plan"]["layout"]["layers"]) == 32


def test_what_the_search_chose_was_not_asked_for(files: dict[str, str]) -> None:
    assert json.loads(files["json"])["training"]["recompute"] == "none"  # SMALL asks for it
    result = run("plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch 16 --pp 4 --dtype fp8 --json")
    data = json.loads(result.out)
    assert data["training"]["recompute"] is None
    assert data["training"]["microbatch"] is None
    assert data["plan"]["layout"]["recompute"] in ("none", "selective", "full")


def test_figures_say_what_they_are_of(files: dict[str, str]) -> None:
    assert "MFU" in files["md"]
    assert "of the peak in bf16" not in files["md"]
    assert "of the peak in bf16" in run(f"{SMALL} --dtype fp8").out
    for part in ("optimiser ", "once a step "):
        assert part in files["screen"]


def test_the_html_page_loads_nothing(files: dict[str, str]) -> None:
    page = files["html"]
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert not re.search(r"<script|<link|<img|src=|url\(|@import", page)
    assert "<svg" in page


def test_the_timeline_names_a_file_that_plan_writes() -> None:
    said = run(f"{SMALL} --schedule interleaved-1f1b").out
    assert "shares are right, single ops are not; -o FILE.html draws all" in " ".join(said.split())
    assert "FILE.svg" not in said


def test_launch_files_stand_beside_the_page(tmp_path: Path) -> None:
    result = run(f"{SMALL} --schedule 1f1b --launch megatron -o {tmp_path}/plan.md")
    assert result.status == 0, result.err
    text = (tmp_path / "megatron.sh").read_text()
    assert "--pipeline-model-parallel-size 4" in text
    result = run(f"{SMALL} --schedule zb-v --launch torch-csv -o {tmp_path}/plan.md")
    assert result.status == 0, result.err
    assert len((tmp_path / "schedule.csv").read_text().splitlines()) == 4
    result = run(f"{SMALL} --schedule zb-v --launch torchtitan -o {tmp_path}/plan.md")
    assert result.status == 0, result.err
    assert 'pipeline_parallel_schedule = "ZBVZeroBubble"' in (tmp_path / "torchtitan.toml").read_text()


def test_another_schedule_is_advised_only_where_the_schedule_is_why() -> None:
    neox = Path(__file__).parent / "data" / "plan" / "configs" / "gpt-neox-20b.json"
    words = "--cluster a100-80gx8 --seq 2048 --global-batch 16 --pp 4 --microbatch 1 --launch megatron"
    result = run(f"plan --model {neox} {words} --schedule 1f1b")
    assert result.status == 2
    assert "the model's side by side" in result.err
    assert "--schedule" not in result.err
    result = run(f"{SMALL} --schedule zb-v --launch megatron")
    assert result.status == 2
    assert result.err.rstrip().endswith("plan for what it runs with --schedule 1f1b --schedule interleaved-1f1b")


def test_a_profile_replaces_the_models_costs(tmp_path: Path) -> None:
    profile = tmp_path / "costs.yaml"
    profile.write_text("unit: ms\nF: [10, 10, 10, 10]\nB: [10, 10, 10, 10]\nW: [10, 10, 10, 10]\nlatency: 0.1\n")
    result = run(f"{SMALL} --tp 1 --schedule 1f1b --profile {profile} --json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    # 8 micro-batches and 3 to fill and drain, 30 ms each, and messages of 0.1 ms
    assert data["plan"]["seconds"] == pytest.approx(11 * 0.03 + 6e-4, abs=0.06)


def test_an_optimised_order_is_planned_with(tmp_path: Path) -> None:
    result = run(f"{SMALL} --tp 1 --schedule 1f1b --optimised 1 --json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    assert data["plan"]["schedule"].startswith("optimised")
    assert data["plan"]["seconds"] < data["baseline"]["seconds"]


BASE = "plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch 16"
FIXED = f"{SMALL} --tp 1 --schedule 1f1b"
FILES = {
    "unitless.yaml": "F: 1.0\n",
    "ms.yaml": "F: 1.0\nunit: ms\n",
    "us.yaml": "F: 1000\nB: 1000\nW: 1000\nunit: us\n",
    "three.yaml": "F: [1, 1, 1]\nunit: s\n",
    "pair.yaml": "overlap_time: 2\nunit: s\n",
    "odd.yaml": "node: h100\ngpus_per_node: 3\nnodes: 2\n",
    "mixed.yaml": "groups:\n  - {node: h100, nodes: 1}\n  - {node: h100, nodes: 2, gpus_per_node: 4}\n",
}
BAD = [
    ("plan --cluster h100x8 --seq 2048 --global-batch 16", "Missing option '--model'."),
    ("plan --model llama3-8b --seq 2048 --global-batch 16", "Missing option '--cluster'."),
    ("plan --model llama3-8b --cluster h100x8 --global-batch 16", "--seq is missing; give it, or a file of the job"),
    ("plan --model llama3-8b --cluster h100x8 --seq 2048", "--global-batch is missing; give it, or a file"),
    ("plan --model llama9 --cluster h100x8 --seq 2048 --global-batch 16", "'llama9': there is no model of this name"),
    ("plan --model llama3-8b --cluster h100 --seq 2048 --global-batch 16", "'h100' says no number of GPUs"),
    ("plan --model llama3-8b --cluster h900x8 --seq 2048 --global-batch 16", "'h900': there is no node of this name"),
    ("plan --model llama3-8b --cluster h100x8 --seq many --global-batch 16", "'many' is not a whole number"),
    ("plan --model llama3-8b --cluster h100x8 --seq 0 --global-batch 16", "job: sequence: 0; a whole number from 1"),
    ("plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch -4", "job: global_batch: -4; a whole number"),
    (
        "plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch 4000000",
        "job: global_batch: 4,000,000; it counts sequences, at most 1,000,000; 4,000,000 tokens would be 1,953",
    ),
    (
        "plan --model llama3-8b --cluster h100x8 --seq 9000 --global-batch 16",
        "sequence: 9,000; llama3-8b has a",
    ),
    (f"{BASE} --dtype int4", "job: dtype: 'int4'; one of bf16, fp16, fp8 is needed"),
    (f"{BASE} --optimizer lion", "job: optimizer: 'lion'; one of"),
    (f"{BASE} --zero 4", "job: zero: 4; a whole number from 0 to 3 is needed"),
    (f"{BASE} --recompute some", "Invalid value for '--recompute': 'some' is not one of"),
    (f"{BASE} --tokens lots", "job: tokens: 'lots'; a number of tokens is needed, such as 15T or 15e12"),
    (f"{BASE} --microbatch 3", "job: global_batch: 16 sequences cannot be cut into micro-batches of 3; nearest: 15"),
    (f"{BASE} --communication-share 1", "job: communication_share: 1.0; a share from 0 to below 1 is needed"),
    (f"{BASE} --tp 3", "tensor = 3; it has to divide the attention heads of llama3-8b: 1, 2, 4, 8, 16, 32"),
    (f"{BASE} --tp 0", "tensor = 0; a whole number of at least 1 is needed"),
    (f"{BASE} --pp 33", "pipeline = 33; llama3-8b has 32 layers, so at most 32 stages can hold one"),
    (f"{BASE} --pp 3", "pipeline 3 = 3 GPUs; h100x8 has 8, which have to be used evenly"),
    (f"{BASE} --tp 2 --pp 2 --dp 4", "tensor 2 x pipeline 2 x data 4 = 16 GPUs; h100x8 has 8"),
    (f"{BASE} --ep 2", "expert = 2; it has to divide the experts of llama3-8b: 1"),
    (f"{BASE} --pp 8 --chunks 8", "pipeline 8 x chunks 8 is 64 stages; llama3-8b has 32 layers, so at most 4 chunks"),
    (f"{BASE} --schedule 2f2b", "no schedule named '2f2b'"),
    (f"{BASE} --pp 1 --schedule dualpipe", "dualpipe: P = 1; its two directions need an even number of ranks"),
    (f"{BASE} --optimised -1", "--optimised -1: seconds from 0 to 3600 are needed"),
    (f"{BASE} --workers 0", "--workers 0: at least 1 is needed"),
    (f"{BASE} --launch slurm", "Invalid value for '--launch': 'slurm' is not one of"),
    (f"{BASE} -o plan.pdf", "-o plan.pdf: a plan is written as .md, .html, .json; give a file's name with one of them"),
    (f"{BASE} --profile nowhere.yaml", "nowhere.yaml: cannot be read: No such file or directory"),
    (f"{BASE} --training nowhere.yaml", "nowhere.yaml: cannot be read: No such file or directory"),
    (f"{BASE} --profile unitless.yaml", "unitless.yaml: states no unit of time; add `unit: ms` (or s, us)"),
    (f"{BASE} --profile ms.yaml", "a profile holds for one layout; fix tensor, pipeline and microbatch"),
    (f"{BASE} --pp 2 --tp 1 -o nowhere/plan.md", "nowhere/plan.md: "),
    (f"{BASE} -o {'x' * 300}.md", f"{'x' * 300}.md: cannot be written: File name too long"),
    (f"{FIXED} --profile three.yaml", "three.yaml: F has 3 values and the schedule has 4 stages"),
    (f"{FIXED} --profile pair.yaml", "pair.yaml: overlap_time is one number and F, B, W or BW is a list"),
    (
        f"{BASE.replace('h100x8', 'odd.yaml').replace('16', '12')} --tp 2",
        "tensor = 2; nodes of 3 GPUs would cut some groups of as many in two: a divisor of 3 is needed, or more than",
    ),
    (
        f"{FIXED} --profile us.yaml",
        "us.yaml: with these times a step takes 0.0853 s, and all 8 GPUs need 0.2 s for its products at their peak",
    ),
    (
        f"{FIXED.replace('h100x8', 'mixed.yaml')} --launch megatron",
        "Megatron-LM cannot run llama3-8b with 1f1b: it starts as many processes on each node, and the cluster has "
        "nodes of 4 and 8",
    ),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[words[-40:] for words, _ in BAD])
def test_wrong_input_is_one_line_and_status_2(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    result = run(words)
    assert result.status == 2, result.out
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert says in result.err, result.err
    assert len(result.err.splitlines()) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == FILES


def test_a_page_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageloom.plan.answer.plan", None)
    result = run(f"{SMALL} -o {tmp_path}/nowhere/plan.md")
    assert result.status == 2
    assert "there is no folder" in result.err


def test_page_and_launch_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "megatron.sh").mkdir()
    (tmp_path / "plan.md").write_text("before")
    result = run(f"{FIXED} --launch megatron -o {tmp_path}/plan.md")
    assert result.status == 2
    assert "megatron.sh: is a folder" in result.err
    assert (tmp_path / "plan.md").read_text() == "before"


def test_a_name_that_is_no_text_is_written_as_it_is_shown(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "_name_or_path": "a\ud800b", "vocab_size": 1000}
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(f"{FIXED.replace('llama3-8b', f'{tmp_path}/config.json')} -o {tmp_path}/plan.md")
    assert result.status == 0, result.err
    assert (tmp_path / "plan.md").read_text().startswith("# a?b on h100x8")


def test_a_screen_too_narrow_for_a_timeline_gets_the_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    result = run(FIXED)
    assert result.status == 0, result.err
    assert "\n0 F" in result.out


def test_no_tensor_parallel_group_lies_half_in_a_node(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("node: h100\ngpus_per_node: 3\nnodes: 2\n")
    result = run(f"plan --model llama3-8b --cluster {tmp_path}/c.yaml --seq 2048 --global-batch 12 --json")
    assert result.status == 0, result.err
    assert not any(name.startswith("TP 2,") for name in json.loads(result.out)["search"]["by_layout"])


def test_products_in_fp8_alone(tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text("node: h100\nnodes: 1\ngpu: {peak: {fp8: 1979e12}}\n")
    result = run(f"{FIXED.replace('h100x8', str(cluster))} --dtype fp8 --json")
    assert result.status == 0, result.err
    assert 0 < json.loads(result.out)["plan"]["mfu"] < 1


@pytest.mark.parametrize(("sequence", "batch"), [(2, 60), (128, 60), (128, 210), (2048, 100)])
def test_a_rank_that_is_never_idle_is_not_idle_less_than_nothing(sequence: int, batch: int, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("hidden: 5\nlayers: 1\nheads: 5\nmlp: 4096\nvocabulary: 1000\n")
    words = f"--seq {sequence} --global-batch {batch} --pp 1 --json"
    result = run(f"plan --model {tmp_path}/m.yaml --cluster h100x1 {words}")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    for one in (data["plan"], *data["same_layout"], *data["front"], *data["alternatives"]):
        assert min(one["bubble"], *one["parts"].values()) >= 0


def test_a_reader_that_has_gone_is_no_failure() -> None:
    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    with contextlib.redirect_stdout(Gone()), pytest.raises(BrokenPipeError):
        console().print("a line")


class Pool:
    """In the place of a pool of processes: does as told, and notes which signals wait when work is handed to it."""

    def __init__(self, answer: list[int] | None) -> None:
        self.answer = answer
        self.held: set[Any] = set()

    def map(self, *_: object) -> list[int]:
        self.held = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        if self.answer is None:
            raise BrokenProcessPool
        return self.answer


def with_pool(pool: Pool) -> Crew:
    crew = Crew(cast("Setup", None), 2)
    crew.pool = cast("Any", pool)
    return crew


def test_a_process_that_is_killed_is_one_line() -> None:
    with pytest.raises(StageloomError, match="ended from outside, perhaps for want of memory; fewer --workers"):
        with_pool(Pool(None)).scores([])


def test_an_interrupt_waits_while_processes_are_started() -> None:
    pool = Pool([])
    assert with_pool(pool).scores([]) == []
    assert signal.SIGINT in pool.held
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_more_workers_than_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Noted(Crew):
        def __init__(self, setup: Setup, workers: int) -> None:
            made.append(workers)
            super().__init__(setup, workers)

    monkeypatch.setattr("stageloom.plan.search.Crew", Noted)
    assert run(f"{FIXED} --workers {10**12}").status == 0
    assert max(made) == 8
