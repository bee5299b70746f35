"""The validator on garbage: it never crashes, and says "sound" exactly where the oracle does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import plain
from stageloom.schedule import Schedule, loads
from stageloom.schedules import records
from stageloom.validate import explain, problems
from verdicts import in_turn, meets, sound

a_number = st.integers(0, 3)
an_op = st.builds(
    lambda kind, microbatch, part, stage, version: f"{kind}{microbatch}.{part}@{stage}^{version}",
    st.sampled_from(["F", "B", "W", "BW"]),
    a_number,
    st.integers(0, 2),
    a_number,
    st.integers(0, 1),
)
an_item = st.one_of(an_op, st.builds("{}&{}".format, an_op, an_op))


@st.composite
def garbage(draw: st.DrawFn) -> Schedule:
    """Any text that can be read: ops of any place on any rank, in any number and order."""
    ranks, stages, paths = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    microbatches = draw(st.integers(1, 3))
    more = draw(st.sampled_from(["asynchronous: 1\n", "asynchronous: 2\n"])) + draw(
        st.sampled_from(["", "slices: 2 sequence\n", "slices: 2 batch\n"])
    )
    for _ in range(paths):
        more += "path: " + " ".join(str(draw(st.integers(0, ranks - 1))) for _ in range(stages)) + "\n"
    if paths == 2:
        first = draw(st.integers(0, microbatches))
        more += f"paths of micro-batches: 0*{first} 1*{microbatches - first}\n"
    tapes = [" ".join(draw(st.lists(an_item, max_size=8))) for _ in range(ranks)]
    lines = [f"rank {rank}: {tape}\n" for rank, tape in enumerate(tapes)]
    head = f"stageloom schedule 1\nname: garbage\nranks: {ranks}\nmicrobatches: {microbatches}\n"
    return loads(head + more + "".join(lines))


@settings(max_examples=400, deadline=None)
@given(garbage(), st.sampled_from(["buffered", "fifo", "blocking"]))
def test_garbage_is_explained_and_never_crashes(bad: Schedule, sends: Any) -> None:
    found = problems(bad, sends=sends)
    assert (found == []) is (sound(bad) and (sends == "buffered" or _fits(bad, sends)))
    assert all(problem.code != "malformed" for problem in found)
    assert all(str(problem) for problem in found)
    assert explain(bad, found)


def _fits(bad: Schedule, sends: str) -> bool:
    work = plain(bad)
    return in_turn(work) if sends == "fifo" else meets(work)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nearly_sound_schedules_get_the_same_verdict_from_the_oracle(data: st.DataObject) -> None:
    """A published schedule with a few ops changed in kind or place, or marked as pairs."""
    record = data.draw(st.sampled_from(records()))
    ranks, microbatches = data.draw(st.sampled_from([(2, 4), (4, 8)]))
    if record.refusal(ranks, microbatches) is not None:
        return
    bad = record(ranks, microbatches)
    columns = {name: getattr(bad, name).copy() for name in ("kind", "stage", "microbatch", "pair")}
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(columns)))
        limit = {"kind": 3, "stage": bad.stages, "microbatch": microbatches, "pair": 1}[name]
        columns[name][data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, limit))
    bad = replace(bad, **columns)
    found = problems(bad)
    assert (found == []) is sound(bad)
    assert explain(bad, found)
