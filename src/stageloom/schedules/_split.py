"""The handcrafted zero-bubble order, shared by ZB-H1 and ZB-H2: a warm-up and a lag of W behind B."""

from stageloom.tape import BW, B, F, Tape, W, join

BWF, BF, B_W, F_BW = B + W + F, B + F, B + W, BW + F


def split_tape(microbatches: int, warmup: int, lag: int) -> Tape:
    """`warmup` forwards; then every step is a B, a W once more than `lag` are owed, and a forward while any remain.

    Source: Qi et al., arXiv 2401.10241, figures 2 and 3. With no lag a B and its W are neighbours and stay one BW.
    """
    steps = microbatches
    warmup = min(warmup, steps)
    lag = min(lag, steps)
    with_forward = steps - warmup
    if lag == 0:
        return join(F * warmup, F_BW * with_forward, BW * (steps - with_forward))
    both = min(lag, with_forward), max(lag, with_forward)
    middle = (BWF if lag < with_forward else B) * (both[1] - both[0])
    return join(F * warmup, BF * both[0], middle, B_W * (steps - both[1]), W * lag)
