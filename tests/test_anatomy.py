"""Chunk anatomy: a small pair to look at, the laws every pair obeys, DeepSeek-V3's published numbers."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.anatomy import Anatomy, Exposed, Parts, Span, anatomy
from stageloom.errors import InputError

NAMES = [field.name for field in fields(Parts)]
ALL_TO_ALLS = ["dispatch", "combine", "dispatch_b", "combine_b"]

times = st.floats(min_value=0, max_value=1e3, allow_subnormal=False)
some_parts = st.builds(Parts, **dict.fromkeys(NAMES, times))
some_layers = st.integers(min_value=1, max_value=4)
shares = st.floats(min_value=0, max_value=0.95)


def at_least(left: float, right: float) -> bool:
    """left >= right, but for rounding."""
    return left >= right or left == pytest.approx(right, rel=1e-9, abs=1e-9)


def draw(a: Anatomy, unit: int) -> str:
    """One row a stream, `unit` characters for a time of 1; dots are an idle stream."""
    rows: list[str] = []
    for stream in ("compute", "communication"):
        row = ["."] * round(a.spans[-1].end * unit)
        for span in (s for s in a.spans if s.stream == stream):
            first, after = round(span.start * unit), round(span.end * unit)
            label = f"{span.part[0].upper()}{span.layer}{span.kind}"
            row[first:after] = label.ljust(after - first - 1, "-") + "|"
        rows.append("".join(row))
    return "\n".join(rows)


# ------------------------------------------------------------------ a pair to look at


def test_two_layers_drawn() -> None:
    # A attention, D dispatch, M MLP, C combine; then the layer; then F, B or W. Compute to communication
    # is 1:1 (6 x 2 to 4 x 3 a layer). The forward goes through layers 0, 1 and the backward through 1, 0.
    # Only the very first combine(B) sticks out: afterwards the compute stream never waits again.
    assert draw(anatomy(Parts(attention=2, dispatch=3, mlp=2, combine=3), layers=2), unit=2) == (
        "A0F|..M1B|M1W|M0F|A1B|A1W|A1F|M0B|M0W|M1F|A0B|A0W|\nC1B--|D0F--|D1B--|C0F--|C0B--|D1F--|D0B--|C1F--|.."
    )


def test_without_weight_parts_drawn() -> None:
    # Nothing is left to run beside the second half of dispatch(B) and of combine(F).
    assert draw(anatomy(Parts(attention=2, dispatch=3, mlp=2, combine=3), weight=False), unit=2) == (
        "A0F|..M0B|..M0F|..A0B|..\n"  #
        "C0B--|D0F--|D0B--|C0F--|"
    )


def test_what_sticks_out_is_named() -> None:
    a = anatomy(Parts(attention=2, dispatch=3, mlp=2, combine=3), layers=2)
    assert a.exposed == (Exposed("combine", "backward", layer=1, time=1.0),)
    assert a.pair == 25
    assert a.hidden == 1 - 1 / 24
    assert a.hidden_dispatch == 1
    assert a.hidden_combine == 1 - 1 / 12


def test_times_of_a_chunk_alone_are_sums() -> None:
    parts = Parts(1, 2, 4, 8, attention_b=16, attention_w=32, mlp_b=64, mlp_w=128, dispatch_b=256, combine_b=512)
    a = anatomy(parts, layers=3, sm_share=0.5)  # alone, nothing overlaps: the share does not matter
    assert a.forward == 3 * (1 + 2 + 4 + 8)
    assert a.backward_input == 3 * (16 + 64 + 256 + 512)
    assert a.backward_weight == 3 * (32 + 128)
    assert a.backward == a.backward_input + a.backward_weight


def test_parts_left_out_take_as_long_as_their_forward() -> None:
    assert anatomy(Parts(1, 2, 3, 4)) == anatomy(Parts(1, 2, 3, 4, 1, 1, 3, 3, 2, 4))


def test_share_of_sms_slows_compute_only_beside_communication() -> None:
    # attention(F) runs beside combine(B): half speed for 1, half of it left, then full speed.
    parts = Parts(attention=1, dispatch=0, mlp=0, combine=0, attention_b=0, attention_w=0, combine_b=1)
    a = anatomy(parts, sm_share=0.5)
    assert a.pair == 1.5
    assert a.hidden == 1


def test_boundary_closes_the_pair() -> None:
    without = anatomy(Parts(2, 2, 2, 2))
    beside_attention_w = anatomy(Parts(2, 2, 2, 2), boundary=2)
    assert beside_attention_w.pair == without.pair  # hidden under attention(W)
    longer = anatomy(Parts(2, 2, 2, 2), boundary=5)
    assert longer.pair == without.pair + 3
    assert longer.exposed == (Exposed("boundary", "both", layer=0, time=3.0),)
    assert longer.hidden == 1  # a share of the all-to-alls; the boundary is not one
    assert longer.spans[-1] == Span("communication", "boundary", "both", "PP", 0, 10.0, 15.0)


def test_boundary_waits_for_the_gradient_as_well() -> None:
    parts = Parts(attention=1, dispatch=1, mlp=1, combine=1, attention_b=5, attention_w=0)
    boundary = anatomy(parts, boundary=1).spans[-1]  # combine(F) ends at 5, attention(B) at 9
    assert (boundary.part, boundary.start, boundary.end) == ("boundary", 9, 10)


def test_rounding_exposes_nothing() -> None:
    # combine(F) of 1.5 hides under attention(B) and (W) of 1.2 + 0.3, which in floats is a little less.
    parts = Parts(1.5, 1.2, 0.7, 1.5, attention_b=1.2, attention_w=0.3, mlp_b=0.2, mlp_w=0.2, dispatch_b=1.6)
    parts = replace(parts, combine_b=0.9)
    assert ("combine", "forward") not in [(e.part, e.direction) for e in anatomy(parts).exposed]


# ------------------------------------------------------------------ laws


@given(some_parts, some_layers, shares, times)
def test_a_pair_lies_between_its_longer_stream_and_no_overlap(
    parts: Parts, layers: int, sm_share: float, boundary: float
) -> None:
    a = anatomy(parts, layers=layers, sm_share=sm_share, boundary=boundary)
    all_to_all = layers * sum(getattr(parts, name) for name in ALL_TO_ALLS)
    compute = a.forward + a.backward - all_to_all
    assert at_least(a.pair, max(compute, all_to_all + boundary))
    # Also with SMs shared: side by side, both streams together still do 2 - sm_share > 1 a unit of time.
    assert at_least(a.forward + a.backward + boundary, a.pair)
    assert at_least(a.pair_input, max(a.forward, a.backward_input))
    assert at_least(a.forward + a.backward_input + boundary, a.pair_input)
    assert at_least(a.pair, a.pair_input)


@given(some_parts, some_layers, shares)
def test_without_all_to_all_a_pair_is_f_b_w_one_after_another(parts: Parts, layers: int, sm_share: float) -> None:
    a = anatomy(replace(parts, **dict.fromkeys(ALL_TO_ALLS, 0.0)), layers=layers, sm_share=sm_share)
    assert a.pair == pytest.approx(a.forward + a.backward_input + a.backward_weight)
    assert a.pair_input == pytest.approx(a.forward + a.backward_input)
    assert a.hidden is a.hidden_dispatch is a.hidden_combine is None  # a share of nothing
    assert a.exposed == ()


def test_without_all_to_all_whole_numbers_are_exact() -> None:
    a = anatomy(Parts(3, 0, 5, 0, 7, 2, 11, 4), layers=7, sm_share=0.3)
    assert a.pair == a.forward + a.backward_input + a.backward_weight == 7 * (3 + 5 + 7 + 2 + 11 + 4)


@given(some_parts, some_layers, shares, st.sampled_from(NAMES), times)
def test_a_longer_part_never_shortens_a_pair(
    parts: Parts, layers: int, sm_share: float, name: str, more: float
) -> None:
    longer = replace(parts, **{name: getattr(parts, name) + more})
    before = anatomy(parts, layers=layers, sm_share=sm_share)
    after = anatomy(longer, layers=layers, sm_share=sm_share)
    assert at_least(after.pair, before.pair)
    assert at_least(after.pair_input, before.pair_input)


@given(some_parts, some_layers, shares, shares)
def test_a_larger_share_never_shortens_a_pair(parts: Parts, layers: int, one: float, other: float) -> None:
    low, high = (anatomy(parts, layers=layers, sm_share=share).pair for share in sorted((one, other)))
    assert at_least(high, low)


@given(some_parts, some_layers, st.booleans())
def test_spans_keep_streams_in_order_and_data_ready(parts: Parts, layers: int, weight: bool) -> None:
    spans = anatomy(parts, layers=layers, weight=weight).spans
    assert len(spans) == layers * (10 if weight else 8)
    assert [s.start for s in spans] == sorted(s.start for s in spans)

    def one_after_another(chain: list[Span]) -> bool:
        return all(at_least(later.start, earlier.end) for earlier, later in pairwise(chain))

    for stream in ("compute", "communication"):
        assert one_after_another(sorted((s for s in spans if s.stream == stream), key=lambda s: (s.start, s.end)))
    # The chain of one micro-batch is serial. So what hides an all-to-all is the other micro-batch, or a W.
    find = {(s.part, s.kind, s.layer): s for s in spans}
    forward = [find[p, "F", k] for k in range(layers) for p in ("attention", "dispatch", "mlp", "combine")]
    backward = [find[p, "B", k] for k in reversed(range(layers)) for p in ("combine", "mlp", "dispatch", "attention")]
    assert one_after_another(forward)
    assert one_after_another(backward)


@given(some_parts, some_layers, shares, times, st.booleans())
def test_exposed_time_is_communication_beside_an_idle_compute_stream(
    parts: Parts, layers: int, sm_share: float, boundary: float, weight: bool
) -> None:
    a = anatomy(parts, layers=layers, sm_share=sm_share, boundary=boundary, weight=weight)
    compute = [s for s in a.spans if s.stream == "compute"]

    def idle_beside(span: Span) -> float:
        overlaps = (min(span.end, c.end) - max(span.start, c.start) for c in compute)
        return span.end - span.start - math.fsum(o for o in overlaps if o > 0)

    reported = {(e.part, e.direction, e.layer): e.time for e in a.exposed}
    assert len(reported) == len(a.exposed)
    for span in (s for s in a.spans if s.stream == "communication"):
        time = reported.get((span.part, span.direction, span.layer), 0.0)
        assert time == pytest.approx(idle_beside(span), abs=1e-6)
    if a.hidden is not None:
        total = math.fsum(s.end - s.start for s in a.spans if s.part in ("dispatch", "combine"))
        stuck_out = math.fsum(e.time for e in a.exposed if e.part != "boundary")
        assert 0 <= a.hidden <= 1
        assert a.hidden * total == pytest.approx(total - stuck_out, abs=1e-6)


# ------------------------------------------------------------------ DeepSeek-V3


@pytest.mark.parametrize(("layers", "hidden"), [(1, 1 - 0.5 / 6), (4, 1 - 0.5 / 24), (8, 1 - 0.5 / 48)])
def test_computation_to_communication_of_one_to_one(layers: int, hidden: float) -> None:
    # arXiv 2412.19437, section 3.2.1: "approximately 1:1". With all compute parts alike and all
    # all-to-alls alike, only a pair's first all-to-all sticks out, by a third of its time.
    a = anatomy(Parts(attention=1, dispatch=1.5, mlp=1, combine=1.5), layers=layers)
    assert a.hidden == pytest.approx(hidden)
    assert a.pair == 6 * layers + 0.5


def test_all_to_all_that_lasts_longer_than_compute_cannot_hide() -> None:
    a = anatomy(Parts(attention=1, dispatch=3, mlp=1, combine=3), layers=4)
    assert a.hidden == pytest.approx(0.5)  # 24 of 48: all the compute there is
    assert a.pair == 48


def test_sharing_sms_costs_what_it_slows() -> None:
    # 20 of the 132 SMs (section 3.2.2). Compute becomes longer than its all-to-alls, and hides more of them.
    parts = Parts(attention=1, dispatch=1.5, mlp=1, combine=1.5)
    free, shared = anatomy(parts, layers=4), anatomy(parts, layers=4, sm_share=20 / 132)
    assert shared.pair == pytest.approx(27.909, abs=1e-3)
    assert free.pair == 24.5
    assert shared.hidden is not None
    assert free.hidden is not None
    assert shared.hidden > free.hidden


def test_published_profile_of_a_pair() -> None:
    # github.com/deepseek-ai/profile-data, train.json: one pair of four-layer chunks, in milliseconds. Each
    # value is the mean over the four layers, from the first kernel of the part to its last. They were
    # measured in the overlapped run, so what sharing the SMs costs is in them already: sm_share is 0.
    # This checks the queue order, not the parts. Measured: 129.0 ms, and 97.8 % of the all-to-all hidden.
    parts = Parts(
        attention=4.60, dispatch=6.74, mlp=4.64, combine=8.70,
        attention_b=9.54, attention_w=2.40, mlp_b=5.36, mlp_w=5.07, dispatch_b=7.56, combine_b=5.78,
    )  # fmt: skip
    a = anatomy(parts, layers=4)
    assert a.pair == pytest.approx(129.0, rel=0.02)
    assert a.hidden == pytest.approx(0.978, abs=0.02)
    assert [(e.part, e.direction, e.layer) for e in a.exposed] == [("combine", "backward", 3)]


# ------------------------------------------------------------------ wrong input


@pytest.mark.parametrize("name", [*NAMES, "boundary"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True])
def test_a_time_must_be_finite_and_not_negative(name: str, value: Any) -> None:
    parts, more = Parts(1, 1, 1, 1), {}
    if name == "boundary":
        more = {name: value}
    else:
        parts = replace(parts, **{name: value})
    with pytest.raises(InputError, match=rf"^{name} is {value!r}; .*finite number, 0 or more"):
        anatomy(parts, **more)


@pytest.mark.parametrize("layers", [0, -1, 1.5, True, "2"])
def test_layers_must_be_a_positive_whole_number(layers: Any) -> None:
    with pytest.raises(InputError, match=rf"^layers is {layers!r}; .*at least 1"):
        anatomy(Parts(1, 1, 1, 1), layers=layers)


@pytest.mark.parametrize("sm_share", [-0.1, 1, 1.5, math.nan, "0.1", None])
def test_sm_share_must_leave_something_to_compute(sm_share: Any) -> None:
    with pytest.raises(InputError, match=rf"^sm_share is {sm_share!r}; .*at least 0 and below 1"):
        anatomy(Parts(1, 1, 1, 1), sm_share=sm_share)


def test_a_required_part_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match=r"^mlp is None; "):
        anatomy(Parts(1, 1, None, 1))  # type: ignore[arg-type]
