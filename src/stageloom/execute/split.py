"""The backward of a stage in two parts: B, the gradient of its inputs, and W, the gradient of its weights.

A schedule that fills bubbles with W needs a stage whose backward can be split. How, is a choice by stage:

    deferred   layers of known types (Linear, Conv1d/2d/3d, Embedding, LayerNorm, GroupNorm, RMSNorm, Experts) queue
               their weight gradients in B, and W computes them. One walk of the graph, in B: no work is done twice,
               recomputation under checkpointing (use_reentrant=False) happens once, and after B only the inputs and
               output gradients of those layers are alive.
    graph      autograd's own split: B asks it for the inputs' gradients and keeps the graph, W for the parameters'.
               Right for any layer, but each walks most of the graph, W recomputes once more under checkpointing,
               hooks on activations fire in both, and the whole graph stays alive between B and W.
    fused      B computes everything, W nothing: for stages that cannot be split.

`prepare` chooses (mode "auto": deferred where anything can be) and reports; `probe` also checks the choice on a sample.
In every mode the gradients are those of a plain backward, and hooks of parameters fire once a micro-batch.

What "deferred" does not see: a derivative with respect to a deferred layer's weight that the stage takes within its own
forward (autograd.grad(y, layer.weight)) fails; `probe` then gives "fused". In-place changes of stage inputs or output
gradients between B and W, where a deferred layer needs them, are refused.
"""

from __future__ import annotations

from stageloom.execute.split_experts import Experts
from stageloom.execute.split_prepare import Mode, Report, prepare, restore
from stageloom.execute.split_probe import probe
from stageloom.execute.split_run import Saved, run_backward, run_backward_input, run_backward_weight, run_forward

__all__ = [
    "Experts",
    "Mode",
    "Report",
    "Saved",
    "prepare",
    "probe",
    "restore",
    "run_backward",
    "run_backward_input",
    "run_backward_weight",
    "run_forward",
]
