"""Muon for the matrices inside the head, AdamW for its output head and its norms.

Measured on the shipped head, from the same state over the same 200 steps: Muon came as far as AdamW in about 450, for a tenth more time
a step (jobs/results/train_draft/README.md).
"""

from __future__ import annotations

from torch.optim import AdamW, Muon, Optimizer

from engine.models.eagle3 import Eagle3Head

_BETAS = (0.9, 0.95)


def make_optimizers(head: Eagle3Head) -> list[Optimizer]:
    """One learning rate, to be set before each step, suits both: Muon's steps are scaled to the size of AdamW's."""
    inner, others = [], []
    for name, parameter in head.named_parameters():
        (inner if parameter.ndim == 2 and not name.startswith("lm_head") else others).append(parameter)
    return [
        Muon(inner, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, betas=_BETAS, weight_decay=0.0, fused=True),
    ]
