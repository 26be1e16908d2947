"""What is trained: a head that learns from lessons, and can be written where `--head` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.training.teacher import Lesson


class Student(Protocol):
    """A head of a target, or a draft model, as it is trained. `first_ahead`: how many tokens further than the target's
    own its first guess is."""

    kind: str
    first_ahead: int

    @property
    def module(self) -> nn.Module:
        """What has the weights."""

    def predictions(self, lesson: Lesson) -> list[Tensor]:
        """Logits `[B, T', V]` of tokens ever further on, a tensor for each depth. Position 0 of a head's first is about
        the token at 2, as what the target says of that at 1 is known."""

    def write(self, folder: Path) -> None:
        """As others publish such heads."""


def goals(student: Student, lesson: Lesson, depth: int, num_positions: int) -> Tensor:
    """The target's own logits `[B, num_positions, V]` of what the prediction at `depth`, from 0, is about."""
    first = depth + student.first_ahead
    return lesson.logits[:, first : first + num_positions]


def loss_of(student: Student, lesson: Lesson, decay: float) -> Tensor:
    """Cross-entropy to the target's distributions, nats a token, the further on the less it counts."""
    total, weight = torch.zeros(()), 0.0
    for depth, logits in enumerate(student.predictions(lesson)):
        goal = goals(student, lesson, depth, logits.shape[1]).softmax(-1)
        total = total.to(logits.device) - decay**depth * (goal * logits.log_softmax(-1)).sum(-1).mean()
        weight += decay**depth
    return total / weight


@torch.no_grad()
def agreement(student: Student, lesson: Lesson) -> list[float]:
    """Of each depth, how often the head's first choice is the target's, given that all before it were."""
    shares = []
    agreeing: Tensor | None = None
    for depth, logits in enumerate(student.predictions(lesson)):
        agrees = logits.argmax(-1) == goals(student, lesson, depth, logits.shape[1]).argmax(-1)
        before = torch.ones_like(agrees) if agreeing is None else agreeing[:, : agrees.shape[1]]
        shares.append((agrees & before).sum().item() / max(1, int(before.sum())))
        agreeing = agrees & before
    return shares
