"""A head or a draft from beginning to end: text, training, and what came of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from shared.engine.fingerprint import model_fingerprint
from shared.models.demo.train import shuffled_corpus
from shared.self_drafting.trial import Trial, try_head
from shared.settings import StartupError
from shared.training.corpus import Corpus, corpus_of, read_texts
from shared.training.draft_student import DraftStudent
from shared.training.eagle_student import EagleStudent
from shared.training.kept import claim, forget
from shared.training.medusa_student import MedusaStudent
from shared.training.pruning import measure_importance, prune
from shared.training.samples import Sampling, Writing
from shared.training.student import Student
from shared.training.teacher import Teacher
from shared.training.trainer import Lessons, Progress, Trainer

__all__ = [
    "MadeDraft",
    "MadeHead",
    "OnProgress",
    "Text",
    "WantedDraft",
    "WantedHead",
    "distill",
    "forget",
    "train_head",
]

OnProgress = Callable[[Writing | Progress], None]
"""Is told how far the target's writing is, and then the training."""

# What it is tried on: so many held-out texts of so many tokens, and so many tokens behind each.
_NUM_PROMPTS = 12
_PROMPT_TOKENS = 96
_TRIAL_TOKENS = 96
# What of a target matters is looked for in so many batches, and how much of a draft is kept along so many texts.
_IMPORTANCE_BATCHES = 8
_ACCEPTANCE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Text:
    """What is trained on: files below `folder` whose names match `pattern`, or so many `samples` of the target's own;
    or else Python's standard library."""

    folder: Path | None = None
    pattern: str = "*"
    samples: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WantedHead:
    """A head of `kind` that drafts `num_steps` tokens."""

    kind: Literal["medusa", "eagle3"]
    num_steps: int


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """A draft of so many of the target's layers, and this share of its width."""

    num_layers: int
    width: float


@dataclass(frozen=True, slots=True)
class MadeHead:
    """`agreements`: with the target along held-out text, by depth; `trial`: in service, behind so many such texts."""

    target: str
    agreements: list[float]
    num_prompts: int
    trial: Trial


@dataclass(frozen=True, slots=True)
class MadeDraft:
    """`agreement`: how often its first choice is the target's, along held-out text; `acceptance`: how often a token
    that it draws there is kept, the mean of Σ min(p, q)."""

    target: str
    num_parameters: int
    agreement: float
    acceptance: float


def train_head(
    target: str,
    wanted: WantedHead,
    text: Text,
    minutes: float,
    folder: Path,
    on_stage: Callable[[str], None],
    on_progress: OnProgress,
) -> MadeHead:
    """Trains a head of `target` for at most so many minutes, or goes on with one that was begun in that folder.

    Raises StartupError, with one clear line, if the target cannot be loaded or nothing can be learnt from the text.
    """
    teacher, corpus, lessons = _prepare(target, text, minutes, folder, on_stage, on_progress)
    student: Student
    if wanted.kind == "medusa":
        student = MedusaStudent(teacher, wanted.num_steps)
    else:
        student = EagleStudent(teacher, wanted.num_steps)
    identity = f"{wanted.kind} of {wanted.num_steps} tokens for {_identity(teacher, text)}"
    agreements = _run(Trainer(teacher, student, corpus, folder, lessons, identity), on_stage, on_progress)
    on_stage("trying it in service")
    apart = max(_PROMPT_TOKENS, len(corpus.held_out) // _NUM_PROMPTS)
    prompts = [part[:_PROMPT_TOKENS].tolist() for part in torch.split(corpus.held_out, apart)][:_NUM_PROMPTS]
    trial = try_head(target, str(folder), prompts, wanted.num_steps, _TRIAL_TOKENS)
    return MadeHead(teacher.name, agreements, len(prompts), trial)


def distill(
    target: str,
    wanted: WantedDraft,
    text: Text,
    minutes: float,
    folder: Path,
    on_stage: Callable[[str], None],
    on_progress: OnProgress,
) -> MadeDraft:
    """Cuts a draft out of `target` and teaches it for at most so many minutes, or goes on as `train_head` does.

    Raises StartupError likewise, and for a target that nothing can be cut out of.
    """
    teacher, corpus, lessons = _prepare(target, text, minutes, folder, on_stage, on_progress)
    on_stage("measuring what of the target matters")
    batches = corpus.batches(lessons.num_rows, lessons.length, lessons.seed)
    importance = measure_importance(teacher, itertools.islice(batches, _IMPORTANCE_BATCHES))
    draft = prune(teacher, importance, wanted.num_layers, wanted.width)
    student = DraftStudent(teacher, draft)
    identity = f"a draft of {wanted.num_layers} layers and width {wanted.width:g} of {_identity(teacher, text)}"
    [agreement] = _run(Trainer(teacher, student, corpus, folder, lessons, identity), on_stage, on_progress)
    num_rows = min(len(corpus.held_out) // lessons.length, _ACCEPTANCE_ROWS)
    rows = corpus.held_out[: num_rows * lessons.length].view(num_rows, lessons.length)
    return MadeDraft(teacher.name, draft.num_parameters(), agreement, acceptance(student, teacher, rows))


def _run(trainer: Trainer, on_stage: Callable[[str], None], on_progress: OnProgress) -> list[float]:
    if trainer.share > 0:
        on_stage(f"going on with what was begun there, at {trainer.share:.0%}")
    return trainer.run(on_progress)


def _prepare(
    target: str, text: Text, minutes: float, folder: Path, on_stage: Callable[[str], None], on_progress: OnProgress
) -> tuple[Teacher, Corpus, Lessons]:
    if not (math.isfinite(minutes) and minutes > 0):
        raise StartupError(f"minutes is {minutes}: it must be more than 0, and end")
    on_stage("loading the target")
    teacher = Teacher(target)
    claim(folder)  # before anything is written or read for nothing
    lessons = Lessons(minutes, seed=text.seed)
    lessons = replace(lessons, length=min(lessons.length, teacher.config.max_position_embeddings))
    length = lessons.length
    on_stage("reading text" if text.samples is None else "the target writes")
    if text.samples is not None:
        sampling = Sampling(text.samples, length, text.seed, folder, _identity(teacher, text))
        corpus = sampling.corpus(teacher.model, teacher.tokenizer, on_progress)
    elif text.folder is None:
        corpus = corpus_of(shuffled_corpus(text.seed), teacher.tokenizer, length)
    else:
        corpus = corpus_of(read_texts(text.folder, text.pattern, text.seed), teacher.tokenizer, length)
    on_stage(f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    return teacher, corpus, lessons


def _identity(teacher: Teacher, text: Text) -> str:
    where = f"{text.samples} samples" if text.samples is not None else f"{text.folder or 'the library'} {text.pattern}"
    return f"{teacher.name} {model_fingerprint(teacher.model, 0)[:12]} on {where}, seed {text.seed}"


@torch.no_grad()
def acceptance(student: DraftStudent, teacher: Teacher, rows: Tensor) -> float:
    """Mean of Σ min(p, q) over the texts `[B, T]`, at temperature 1 (Leviathan et al. 2023)."""
    shares = []
    for batch in torch.split(rows, 4):
        lesson = teacher.teach(batch)
        [logits] = student.predictions(lesson)
        shares.append(torch.minimum(lesson.logits.softmax(-1), logits.softmax(-1)).sum(-1).mean().item())
    return fmean(shares)
