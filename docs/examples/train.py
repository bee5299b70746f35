"""A small GPT-2 on two local processes: split, step, clip, save, evaluate.  python train.py FOLDER

A second call goes on from the checkpoint in FOLDER.
"""

import sys

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import stageloom as sl
from stageloom.execute.checkpoint import Checkpoint
from stageloom.execute.partition import split
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import Seat, launch

WORDS, LENGTH, ROWS = 64, 16, 2  # ROWS of a micro-batch


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    """Words that count up from anywhere, and those that follow them; the same on all ranks."""
    start = torch.randint(WORDS, (microbatches * ROWS, 1), generator=torch.Generator().manual_seed(step))
    words = (start + torch.arange(LENGTH + 1)) % WORDS
    return words[:, :-1], words[:, 1:]


def train(seat: Seat, schedule: sl.Schedule, folder: str, steps: int) -> tuple[int, list[float], float]:
    """What each rank runs: it is rank `seat.rank` of `seat.size`, in the process group `seat.group`."""
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 2}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, **sizes)
    stages = split(GPT2LMHeadModel(config), 4 // schedule.stages)
    paths = schedule.placement.stages_of[seat.rank]  # a schedule with two paths has replicas
    own = {(path, stage): stages[stage] for path, numbers in enumerate(paths) for stage in numbers}
    pipeline = Pipeline(schedule, own, loss, group=seat.group)  # the tied embedding is found by itself
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    kept = Checkpoint(folder, seat.group)
    began = kept.load(pipeline, optimizer)  # 0 where there is none
    losses: list[float] = []
    for step in range(began, began + steps):
        result = pipeline.step(*batch(schedule.microbatches, step), seed=step)  # the seed is dropout's
        pipeline.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)  # on all ranks
    kept.save(began + steps, pipeline, optimizer)
    for module in own.values():
        module.eval()
    return began, losses, pipeline.evaluate(*batch(schedule.microbatches, 1_000_000)).loss


if __name__ == "__main__":
    schedule = sl.build("zb-v", 2, 4)
    began, losses, evaluated = launch(train, schedule.ranks, schedule, sys.argv[1], 20)[0]
    print(f"steps {began + 1} to {began + len(losses)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"evaluated: {evaluated:.3f}")
