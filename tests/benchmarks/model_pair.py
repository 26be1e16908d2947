"""The model pairs that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.models import DEMO_DRAFT, DEMO_TARGET
from tests.benchmarks.prompts import Prompts, python_prompts, random_prompts
from tests.benchmarks.synthetic_pair import PairShape, make_pair

PAIR_NAMES = ("demo", "synthetic")

_SEED = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its draft, and where prompts for them come from."""

    name: str
    target: Path
    draft: Path
    prompts: Prompts


def load_pair(name: str) -> Pair:
    """The pair of that name, one of PAIR_NAMES; the synthetic one is made if it is not there yet."""
    if name == "demo":
        return Pair(name, DEMO_TARGET, DEMO_DRAFT, python_prompts(DEMO_TARGET, _SEED))
    shape = PairShape()
    target, draft = make_pair(shape=shape)
    return Pair(name, target, draft, random_prompts(shape.vocab, _SEED))
