"""What may give an engine's sequences something to verify, between its steps."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from torch import Tensor

from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.proposal import Proposal
from shared.sampling.sampled import SampledTokens


class Proposer(Protocol):
    """Is asked before each step, and told what came of it. All on the engine's thread."""

    @property
    def drafts_with(self) -> str:
        """What it drafts with that needs the target's own draws to be foreseen; empty if nothing."""

    def propose(self, scheduler: Scheduler) -> None:
        """Gives proposals to sequences that are about to draw. Raises EngineBroken after an accelerator's own error,
        and nothing else."""

    def planned(self, plan: StepPlan | None) -> bool:
        """The step takes place, with these sequences; None: nothing can be done as it is. What it proposed for others
        is given up: they lost their place, or there was no room. Whether there was any such."""

    def drafted(self, sequence: Sequence) -> Proposal:
        """What it proposed for that sequence in this step; empty if that is none of its own."""

    def observe(self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens]) -> None:
        """A step is computed, and the KV of what was accepted stands where it belongs. `captured`: see
        `CausalLM.capture`; `sampled`: what each scheduled sequence with rows gains, and has not taken in yet."""

    def settle(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        """The step has ended, and brought so many tokens."""
