"""DualPipe: two directions over two replicas; a forward of one overlaps the backward of the other, so that a
mixture-of-experts layer's all-to-all hides under compute.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, figure 5 and table 2; the eight steps are those of DeepSeek's
published description of the schedule. Here F0, F1 are forwards of the two directions as this rank meets them: 0 is the
direction in which the rank is in the first half of the pipeline.
"""

from stageloom.placement import two_way
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Promise, Record, Refusal, even_ranks
from stageloom.tape import BW, B, F, Tape, W, join, mirrored


class Words:
    """The recurring words of DualPipe's steps, for (F, B, BW) of direction 0 and of direction 1."""

    def __init__(self, own: tuple[Tape, Tape, Tape], other: tuple[Tape, Tape, Tape]) -> None:
        f0, b0, bw0 = own
        f1, b1, bw1 = other
        self.f0 = f0
        self.bw1 = bw1
        self.b0 = b0
        self.forwards = f0 + f1
        self.split = b1 + W + f1
        self.overlapped = (f0 & bw1) + (f1 & bw0)
        self.apart = f0 + bw1 + (f1 & bw0)
        self.turned = bw1 + (f1 & bw0)
        self.full = bw1 + bw0
        self.inputs = b1 + b0
        self.weights = W + b0


def steps(words: Words, far: int, near: int, pairs: int, middle: bool) -> Tape:
    """DualPipe's eight steps. `far` (H-h-1) and `near` (h+1) count ranks to the turn and to the end, `pairs` the rounds
    of step 4; `middle`: its first F0 and B1 are not overlapped."""
    whole = near // 2  # rounds of step 6 with full backwards; where `near` is odd the split starts inside a round
    odd = near % 2
    return join(
        words.f0 * (2 * far),
        words.forwards * near,
        words.split * far,
        words.apart * int(middle and pairs > 0),
        words.overlapped * max(pairs - int(middle), 0),
        words.turned * far,
        words.full * whole,
        (words.bw1 + words.b0) * odd,
        words.inputs * (near - whole - odd),
        words.weights * far,
        W * near,
    )


def build(ranks: int, microbatches: int) -> Schedule:
    half = ranks // 2
    words = Words(*((F.on(path=path), B.on(path=path), BW.on(path=path)) for path in (0, 1)))
    first_half = [
        steps(words, half - near, near, microbatches // 2 - ranks + near, near == half) for near in range(1, half + 1)
    ]
    second_half = [mirrored(tape) for tape in reversed(first_half)]
    return assemble("dualpipe", two_way(ranks), first_half + second_half, microbatches)


def limits(ranks: int, microbatches: int) -> Refusal | None:
    odd = even_ranks(ranks)
    if odd is not None:
        return odd
    least = 2 * ranks
    if microbatches < least:
        return Refusal(f"M = {microbatches} on P = {ranks}; it needs at least M = 2P", f"nearest: M = {least}")
    if microbatches % 2:
        return Refusal(
            f"M = {microbatches}; half of them take each direction, so it needs an even number",
            f"nearest: M = {microbatches - 1 if microbatches > least else least} or {microbatches + 1}",
        )
    return None


def balanced(c: Case) -> bool:
    """The times for which the bubble formula of DualPipe and DualPipeV is exact."""
    return c.latency == 0 and c.F == c.B >= c.W and c.paired == c.F + c.B + c.W


record = Record(
    name="dualpipe",
    title="DualPipe",
    citation="DeepSeek-V3, arXiv 2412.19437, figure 5 and table 2",
    summary="two directions, forward overlapped with the other's backward; two copies of the parameters",
    build=build,
    limits=limits,
    bubble=Promise(
        "(P/2-1)(F&B + B - 3W), B the full backward",
        lambda c: (c.ranks // 2 - 1) * (c.paired + c.B + c.W - 3 * c.W),
        "equal stages, no latency, F = B, W <= F, pair = F + B + W",
        balanced,
    ),
    activations=Promise(
        "P+1", lambda c: [c.ranks + 1.0] * c.ranks, "M >= 2P+2", lambda c: c.microbatches >= 2 * c.ranks + 2
    ),
)
