"""Training a student: for so long, resumable, and no longer than it helps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from shared.training.corpus import Corpus
from shared.training.kept import STATE, Kept, claim
from shared.training.student import Student, agreement, loss_of
from shared.training.teacher import Teacher

_WARM_UP_STEPS = 50
_LEAST_RATE = 0.05
_DECAY = 0.8
_MOST_CHECK_ROWS = 16


@dataclass(frozen=True, slots=True)
class Lessons:
    """How it is trained: windows of `length` tokens, `num_rows` at a time, for `minutes` in all; `peak_rate` is the
    optimizer's. It is looked at every `check_seconds`, and ends when it was no better `patience` times in a row."""

    minutes: float
    num_rows: int = 4
    length: int = 256
    peak_rate: float = 3e-3
    check_seconds: float = 60.0
    patience: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: `share` of the time, `loss` (nats a token) lately, and the latest `agreements` by depth."""

    share: float
    step: int
    loss: float
    agreements: list[float]

    @property
    def news(self) -> object:
        """What is worth another line when it changes."""
        return self.agreements

    def __str__(self) -> str:
        known = [] if math.isnan(self.loss) else [f"loss {self.loss:.3f}"]
        if self.agreements:
            known.append(f"agrees {' '.join(f'{share:.0%}' for share in self.agreements)}")
        return ", ".join(known) or "begins"


class Trainer:
    """Keeps its state beside what it writes, in `training.pt`: with the same folder it goes on from there, until what
    came of it is told and the state is not needed any more (`forget`)."""

    def __init__(
        self, teacher: Teacher, student: Student, corpus: Corpus, folder: Path, lessons: Lessons, identity: str
    ) -> None:
        """`identity`: what is learnt from what. Raises StartupError as `claim` does, and if the folder holds the
        state of another training."""
        self._teacher = teacher
        self._student = student
        self._corpus = corpus
        self._folder = folder
        self._lessons = lessons
        self._kept = Kept(folder / STATE, identity)
        self._done = False
        self._optimizer = torch.optim.AdamW(student.module.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._step = 0
        self._seconds = 0.0
        self._best: list[float] = []
        self._num_worse = 0
        self._weights: dict[str, Tensor] = {}
        claim(folder)
        self._kept.read(self._take_up)

    @property
    def share(self) -> float:
        """Of its time, what is over."""
        return min(1.0, self._seconds / (60 * self._lessons.minutes))

    def run(self, on_progress: Callable[[Progress], None]) -> list[float]:
        """Trains until the time is over or nothing improves; writes the best, and returns its agreement by depth with
        the target on held-out text. Interrupted, it goes on from there the next time, and else from the latest look at
        it."""
        on_progress(Progress(self.share, self._step, math.nan, self._best))
        try:
            loss = self._train(on_progress)
        except KeyboardInterrupt:
            self._keep()
            raise
        self._student.module.load_state_dict(self._weights)
        self._student.write(self._folder)
        on_progress(Progress(1.0, self._step, loss, self._best))
        return self._best

    def _train(self, on_progress: Callable[[Progress], None]) -> float:
        lessons = self._lessons
        batches = self._corpus.batches(lessons.num_rows, lessons.length, lessons.seed, first=self._step)
        began = time.monotonic() - self._seconds
        checked_at = self._seconds
        agreements = self._best
        loss = math.nan
        for batch in batches:
            self._seconds = time.monotonic() - began
            share = self._seconds / (60 * lessons.minutes)
            if self._done or share >= 1 or self._num_worse >= lessons.patience:
                break
            new_loss = self._learn(batch, share)
            loss = new_loss if math.isnan(loss) else 0.95 * loss + 0.05 * new_loss
            if self._seconds - checked_at >= lessons.check_seconds:
                checked_at = self._seconds
                agreements = self._check()
                self._keep()
            on_progress(Progress(share, self._step, loss, agreements))
        if not self._done:
            self._check()
            self._done = True
            self._keep()
        return loss

    def _learn(self, batch: Tensor, share: float) -> float:
        rate = self._lessons.peak_rate * min(1.0, (self._step + 1) / _WARM_UP_STEPS)
        rate *= _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._student.module.train()
        loss = loss_of(self._student, self._teacher.teach(batch), _DECAY)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._student.module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return loss.item()

    def _check(self) -> list[float]:
        """Agreement on held-out text; the weights count if they are the best."""
        length = self._lessons.length
        num_rows = min(len(self._corpus.held_out) // length, _MOST_CHECK_ROWS)
        rows = self._corpus.held_out[: num_rows * length].view(num_rows, length)
        self._student.module.eval()
        batches = torch.split(rows, self._lessons.num_rows)
        parts = [agreement(self._student, self._teacher.teach(batch)) for batch in batches]
        found = [fmean(each) for each in zip(*parts, strict=True)]
        if not self._weights or expected(found) > expected(self._best):
            self._weights = {name: each.clone() for name, each in self._student.module.state_dict().items()}
            self._best, self._num_worse = found, 0
        else:
            self._num_worse += 1
        return found

    def _keep(self) -> None:
        self._kept.write(
            {
                "done": self._done,
                "step": self._step,
                "seconds": self._seconds,
                "best": self._best,
                "num_worse": self._num_worse,
                "weights": self._weights,
                "module": self._student.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }
        )

    def _take_up(self, state: Mapping[str, Any]) -> None:
        self._done = state["done"]
        self._student.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._seconds = state["step"], state["seconds"]
        self._best, self._num_worse, self._weights = state["best"], state["num_worse"], state["weights"]


def expected(agreements: list[float]) -> float:
    """Draft tokens that are accepted, where the target draws its likeliest and a chain is as long as these."""
    total, line = 0.0, 1.0
    for share in agreements:
        line *= share
        total += line
    return total
