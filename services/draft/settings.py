"""Settings of a draft worker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shared.worker.settings import WorkerSettings

NO_MODEL = "none"
"""What `model` is called where there is none."""


class DraftSettings(WorkerSettings):
    """A draft worker: its engine, and how it proposes."""

    service: ClassVar[str] = "draft"

    model: str = Field(
        min_length=1, description="Model to load: a local folder or a hub name; none: copy from texts alone."
    )
    port: int = Field(default=50053, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    optimistic: bool = Field(
        default=False, description="Go on drafting on the guess that all is accepted, while the target verifies."
    )
    copied_tokens: int = Field(
        default=1 << 18,
        ge=0,
        description="Tokens of running sequences and past outputs to remember, some 0.2 KB each: what followed there "
        "where a text's end occurred before is proposed again; 0: nothing is copied.",
    )
    proposal_mass: float = Field(
        default=0.98, gt=0, le=1, description="Probability that a truncated proposal distribution keeps, in (0, 1]."
    )
    max_candidates: int = Field(default=512, ge=1, description="Most tokens in a truncated proposal distribution.")
