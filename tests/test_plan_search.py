"""The search: as good as trying everything, its floors sound."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stageloom.placement import Placement, line, loop, zigzag
from stageloom.plan import Cluster, Model, Training, gpt, load_cluster, load_model
from stageloom.plan.alternatives import cut_of, try_form
from stageloom.plan.floors import Setup, cut_floor, set_up, stage_sums, time_floor
from stageloom.plan.floors_memory import cut_memory_floor, memory_floor
from stageloom.plan.forms import forms
from stageloom.plan.layout import Layout, spread
from stageloom.plan.predict import predict
from stageloom.plan.score import Scored
from stageloom.plan.search import front, prepare, search
from stageloom.plan.space import Space, chunk_counts
from stageloom.plan.spreading import laid_out

FACTS = Path(__file__).parent / "facts"


def dense() -> tuple[Model, Cluster, Training, Space]:
    return gpt(4096, 32, 16), load_cluster("a100-80gx8"), Training(2048, 16, 1, dtype="fp16"), Space()


def sparse() -> tuple[Model, Cluster, Training, Space]:
    model = load_model("mixtral-8x7b")
    model = replace(model, layers=model.layers[:8])
    return model, load_cluster("h100x16"), Training(2048, 32, 1), Space(tensor=1, recompute=("none", "full"))


CASES = {"dense": dense, "sparse": sparse}


@cache
def everything(case: str) -> tuple[Setup, tuple[Scored, ...]]:
    """Every candidate of a case predicted, none left out."""
    model, cluster, training, space = CASES[case]()
    setup = set_up(model, cluster, training)
    cuts = prepare(setup, space)
    found: list[Scored] = []
    for cut in cuts:
        for form in forms(None, chunk_counts(len(model.layers), cut.pipeline, space)):
            if cut.pipeline == 1 and not (form.paired or form.name == "1f1b"):
                continue
            one = try_form(setup, cut, form)
            found += [] if one is None else [one]
    return setup, tuple(sorted(found, key=lambda one: one.place))


@pytest.mark.parametrize("case", CASES)
def test_the_search_finds_what_trying_everything_finds(case: str) -> None:
    _, all_of_them = everything(case)
    assert len(all_of_them) > 100
    best = next(one for one in all_of_them if one.fits)
    found = search(*CASES[case]())
    assert found.best == best
    near = [one for one in front(all_of_them) if one.seconds <= best.seconds * (1 + found.slack)]
    assert [(one.seconds, one.memory) for one in near] == [
        (one.seconds, one.memory) for one in found.front if one.seconds <= best.seconds * (1 + found.slack)
    ]
    assert len(found.scored) < len(all_of_them)


@pytest.mark.parametrize("case", CASES)
def test_floors_are_never_above_what_is_predicted(case: str) -> None:
    setup, all_of_them = everything(case)
    for one in all_of_them:
        cut = cut_of(one)
        assert cut_floor(setup, cut, one.microbatches, pairs=True) <= one.seconds * (1 + 1e-9), one
        sums = stage_sums(setup, cut, one.form, one.layout.layers)
        assert time_floor(sums, one.form, cut.pipeline, one.microbatches) <= one.seconds * (1 + 1e-9), one
        assert cut_memory_floor(setup, cut) <= one.memory * (1 + 1e-9), one
        assert memory_floor(setup, one.layout, one.form, 1e18) <= one.memory * (1 + 1e-9), one


def test_floors_are_worth_having() -> None:
    """On the mean over candidates the time floor is near the step, and the memory floor near what is held."""
    setup, all_of_them = everything("dense")
    times, sizes = [], []
    for one in all_of_them:
        sums = stage_sums(setup, cut_of(one), one.form, one.layout.layers)
        times.append(time_floor(sums, one.form, one.layout.pipeline, one.microbatches) / one.seconds)
        sizes.append(memory_floor(setup, one.layout, one.form, 1e18) / one.memory)
    assert sum(times) / len(times) > 0.75
    assert sum(sizes) / len(sizes) > 0.75


def test_the_result_is_the_same_with_more_processes() -> None:
    model, cluster, training, _ = dense()
    space = Space(tensor=1, recompute=("none",))
    alone = search(model, cluster, training, space)
    from stageloom.plan import crew

    worth, crew.WORTH = crew.WORTH, -1.0
    try:
        together = search(model, cluster, training, space, workers=2)
    finally:
        crew.WORTH = worth
    assert together.scored == alone.scored
    assert together.dropped == alone.dropped


@pytest.mark.parametrize("place", [line(8), loop(4, 2), zigzag(4, 2), zigzag(2, 4)], ids=str)
def test_layers_are_spread_so_that_ranks_are_even(place: Placement) -> None:
    work = np.array([0.3, *[1.0] * 22, 2.2])
    counts = laid_out(work, place)
    assert sum(counts) == 22
    assert min(counts[1:-1]) >= 1
    stages = [float(each) for each in counts]
    stages[0] += 0.3
    stages[-1] += 2.2
    busy = [0.0] * place.ranks
    for stage, rank in enumerate(place.table[0]):
        busy[rank] += stages[stage]
    assert max(busy) <= sum(busy) / len(busy) + 1.0  # no layer could move and help much


def test_stages_of_published_depths_are_as_even_as_by_hand() -> None:
    assert laid_out(np.array([0.1, *[1.0] * 61, 2.3]), line(16)) == (4,) * 15 + (1,)
    assert laid_out(np.array([0.0, *[1.0] * 24, 0.0]), line(4)) == (6, 6, 6, 6)


# ------------------------------------------------------------------ published layouts


@pytest.mark.parametrize(
    "row", json.loads((FACTS / "megatron_table1.json").read_text())["rows"], ids=lambda r: f"{r[0]}B"
)
def test_the_choice_is_at_least_as_fast_as_the_published_layout(row: list[float]) -> None:
    """arXiv 2104.04473, table 1: the published layout, by the planner's own measure, with recomputation as there."""
    _, heads, hidden, layers, tensor, pipeline, gpus, batch = (int(each) for each in row[:8])
    model, cluster = gpt(hidden, heads, layers), load_cluster(f"a100-80gx{gpus}")
    training = Training(2048, batch, dtype="fp16")
    data = gpus // tensor // pipeline
    chunks = {1: 1, 2: 2, 8: 2, 35: 3}[pipeline]
    published = [
        predict(
            model, cluster, training,
            Layout(tensor, pipeline, data, 1, chunks, size, "full", layers=spread(layers, pipeline * chunks)),
            "1f1b" if chunks == 1 else "interleaved-1f1b",
        )
        for size in (1, 2, 4)
        if batch % (data * size) == 0
    ]  # fmt: skip
    fits = [one.seconds for one in published if one.peak_memory <= cluster.gpu.memory]
    found = search(model, cluster, training, Space(recompute=("selective", "full")), slack=0.0)
    assert found.best.seconds <= min(fits)
