"""Megatron-LM's walk over the chunks of a loop, shared by the interleaved schedules.

Source: Narayanan et al., arXiv 2104.04473, section 2.2, and Megatron-LM's rule for sizes: micro-batches go through the
chunks in groups of g, P <= g <= M, and the last group is whole or at least P long (a shorter one can deadlock).
"""

from stageloom.tape import Tape, join


def group_size(ranks: int, microbatches: int) -> int:
    """The smallest group that Megatron-LM's rule allows; fewer micro-batches than ranks are one group."""
    for size in range(ranks, microbatches):
        rest = microbatches % size
        if rest == 0 or rest >= ranks:
            return size
    return microbatches


def walk(op: Tape, chunks: list[int], microbatches: int, group: int) -> Tape:
    """`op` for every micro-batch and chunk: a group on the first of `chunks`, on the second, .. then the next group."""
    rounds, rest = divmod(microbatches, group)
    return _round(op, chunks, group) * rounds + _round(op, chunks, rest)


def _round(op: Tape, chunks: list[int], size: int) -> Tape:
    return join(*(op.on(chunk=chunk) * size for chunk in chunks))
