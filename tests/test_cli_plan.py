"""`stageloom plan`: what it prints and writes agrees, and wrong input gets one line."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from command import Result, stageloom

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
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[words[-40:] for words, _ in BAD])
def test_wrong_input_is_one_line_and_status_2(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unitless.yaml").write_text("F: 1.0\n")
    (tmp_path / "ms.yaml").write_text("F: 1.0\nunit: ms\n")
    result = run(words)
    assert result.status == 2, result.out
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert says in result.err, result.err
    assert len(result.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ms.yaml", "unitless.yaml"]
