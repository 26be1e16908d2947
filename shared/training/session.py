"""A head from beginning to end: text, training, and what it brings in service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shared.models.demo.train import shuffled_corpus
from shared.self_drafting.trial import Trial, try_head
from shared.training.corpus import Corpus, corpus_of, read_texts, sample_corpus
from shared.training.eagle_student import EagleStudent
from shared.training.medusa_student import MedusaStudent
from shared.training.student import Student
from shared.training.teacher import Teacher
from shared.training.trainer import Lessons, Progress, Trainer

# What it is tried on: so many held-out texts of so many tokens, and so many tokens behind each.
_NUM_PROMPTS = 12
_PROMPT_TOKENS = 96
_TRIAL_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Wanted:
    """A head of `kind` for `target`, that drafts `num_steps` tokens, trained for at most so many `minutes`: on files
    below `text` whose names match `pattern`, or on so many `samples` of the target's own, or else on Python's standard
    library."""

    target: str
    kind: Literal["medusa", "eagle3"]
    num_steps: int
    minutes: float
    text: Path | None = None
    pattern: str = "*"
    samples: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Made:
    """`agreements`: with the target along held-out text, by depth; `trial`: in service, behind so many such texts."""

    target: str
    agreements: list[float]
    num_prompts: int
    trial: Trial


def train_head(
    wanted: Wanted, folder: Path, on_stage: Callable[[str], None], on_progress: Callable[[Progress], None]
) -> Made:
    """Trains it, or goes on with one that was begun in that folder. Raises StartupError, with one clear line, if the
    target cannot be loaded or nothing can be learnt from the text."""
    on_stage("loading the target")
    teacher = Teacher(wanted.target)
    lessons = Lessons(wanted.minutes, seed=wanted.seed)
    on_stage("reading text" if wanted.samples is None else "the target writes")
    corpus = _corpus(wanted, teacher, lessons.length)
    on_stage(f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    student: Student
    if wanted.kind == "medusa":
        student = MedusaStudent(teacher, wanted.num_steps)
    else:
        student = EagleStudent(teacher, wanted.num_steps)
    agreements = Trainer(teacher, student, corpus, folder, lessons).run(on_progress)
    on_stage("trying it in service")
    apart = max(_PROMPT_TOKENS, len(corpus.held_out) // _NUM_PROMPTS)
    prompts = [part[:_PROMPT_TOKENS].tolist() for part in torch.split(corpus.held_out, apart)][:_NUM_PROMPTS]
    trial = try_head(wanted.target, str(folder), prompts, wanted.num_steps, _TRIAL_TOKENS)
    return Made(teacher.name, agreements, len(prompts), trial)


def _corpus(wanted: Wanted, teacher: Teacher, length: int) -> Corpus:
    if wanted.samples is not None:
        return sample_corpus(teacher.model, teacher.tokenizer, wanted.samples, length, wanted.seed)
    if wanted.text is None:
        texts = shuffled_corpus(wanted.seed)
    else:
        texts = read_texts(wanted.text, wanted.pattern, wanted.seed)
    return corpus_of(texts, teacher.tokenizer, length)
