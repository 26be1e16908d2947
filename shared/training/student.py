"""What is trained: a head that learns from lessons, and can be written where `--head` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.training.teacher import Lesson


class Student(Protocol):
    """A head of a target, as it is trained."""

    kind: str

    @property
    def module(self) -> nn.Module:
        """What has the weights."""

    def predictions(self, lesson: Lesson) -> list[Tensor]:
        """Logits `[B, T', V]` of the tokens one, two, ... further than the target's own: the first at position 0 is
        that of the token at 2, as what the target says there is known."""

    def write(self, folder: Path) -> None:
        """As others publish such heads."""


def goals(lesson: Lesson, depth: int, num_positions: int) -> Tensor:
    """The target's own logits `[B, num_positions, V]` of what the prediction at `depth`, from 0, is about."""
    return lesson.logits[:, depth + 1 : depth + 1 + num_positions]


def loss_of(student: Student, lesson: Lesson, decay: float) -> Tensor:
    """Cross-entropy to the target's distributions, nats a token, the further on the less it counts."""
    total, weight = torch.zeros(()), 0.0
    for depth, logits in enumerate(student.predictions(lesson)):
        goal = goals(lesson, depth, logits.shape[1]).softmax(-1)
        total = total.to(logits.device) - decay**depth * (goal * logits.log_softmax(-1)).sum(-1).mean()
        weight += decay**depth
    return total / weight


@torch.no_grad()
def agreement(student: Student, lesson: Lesson) -> list[float]:
    """Of each depth, how often the head's first choice is the target's, given that all before it were."""
    shares = []
    agreeing: Tensor | None = None
    for depth, logits in enumerate(student.predictions(lesson)):
        agrees = logits.argmax(-1) == goals(lesson, depth, logits.shape[1]).argmax(-1)
        before = torch.ones_like(agrees) if agreeing is None else agreeing[:, : agrees.shape[1]]
        shares.append((agrees & before).sum().item() / max(1, int(before.sum())))
        agreeing = agrees & before
    return shares
