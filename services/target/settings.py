"""Settings of a target worker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.engine.settings import Quantize
from shared.settings import RedisUrl
from shared.worker.settings import WorkerSettings


class TargetSettings(WorkerSettings):
    """A target worker: its engine, its part in the deployment, and how KV comes and goes."""

    service: ClassVar[str] = "target"

    port: int = Field(default=50052, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    role: Literal["both", "prefill", "decode"] = Field(
        default="both", description="Part in the deployment: prefill, decode, or both."
    )
    draft: str | None = Field(
        default=None,
        min_length=1,
        description="A small model that drafts inside this worker, of the same tokenizer: a local folder or a hub "
        "name; unset: none does, a draft worker's may.",
    )
    draft_quantize: Quantize = Field(
        default="none", description="What its weights are rounded to, as those of the model by quantize."
    )
    head: str | None = Field(
        default=None,
        min_length=1,
        description="A head on this model's hidden states that drafts for it, Medusa or EAGLE: a local folder or a "
        "hub name.",
    )
    early_exit: int | None = Field(
        default=None, ge=1, description="Draft with the model's first so many layers; where there is no head."
    )
    copied_tokens: int = Field(
        default=1 << 18,
        ge=0,
        description="Tokens of running sequences and past outputs that the target itself remembers, some 0.2 KB each, "
        "to copy what followed where a text's end occurred before; 0: nothing is copied here.",
    )
    kv_transfer: Literal["auto", "nixl", "grpc"] = Field(
        default="auto",
        description="How KV blocks are read from other workers: nixl, grpc, or auto: nixl where both ends have it.",
    )
    lease_seconds: float = Field(
        default=10.0, ge=1, description="How long KV blocks are held for a worker that says nothing."
    )
    prefix_store: RedisUrl | None = Field(
        default=None,
        description="Redis that keeps the blocks of prefixes themselves, for all workers (redis://, rediss:// or "
        "unix://); unset: none does.",
    )
    prefix_store_gib: float = Field(
        default=1.0, gt=0, description="Most that the blocks of this model take in prefix_store, in GiB."
    )
    prefix_store_ttl_seconds: float = Field(
        default=3600.0, ge=1, description="How long prefix_store keeps a block that nobody asks for."
    )
    step_log: Path | None = Field(
        default=None,
        description="File to which every step adds a line of JSON: what was in it and what it took. outrider simulate "
        "takes the costs of steps from it.",
    )

    @model_validator(mode="after")
    def _one_drafts(self) -> Self:
        chosen = [name for name in ("draft", "head", "early_exit") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are both set: one of them drafts")
        return self
