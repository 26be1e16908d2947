"""What a drafter brings: texts that an engine writes with it, before it serves anybody."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from typing import ClassVar, NamedTuple

from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.engine.settings import EngineSettings
from shared.prefix.block_hash import root_hash
from shared.sampling.params import SamplingParams, SelfDraft
from shared.sampling.verifier import verify
from shared.self_drafting.loader import load_head
from shared.self_drafting.rounds import SelfDrafting


class _Settings(EngineSettings):
    """Of an engine that is no worker's."""

    service: ClassVar[str] = "trial"


class Trial(NamedTuple):
    """`by_depth`: of draft tokens whose turn came, the share accepted. `tokens_per_step`: of a sequence."""

    by_depth: list[float]
    tokens_per_step: float


def try_drafter(
    engine: Engine, prompts: Tokens[Tokens[int]], depth: int, num_tokens: int, most_seconds: float = float("inf")
) -> Trial:
    """Writes up to `num_tokens` behind each prompt, each token the likeliest, drafted in chains of `depth`; the time
    that it may take is looked at between steps. Only in an engine that serves nobody else."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, self_draft=SelfDraft(depth, sources=("target",)))
    root = root_hash(engine.fingerprint, b"")
    sequences = [Sequence(prompt, len(prompt), params, root, num_steps=num_tokens) for prompt in prompts]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    turns, accepted = [0] * depth, [0] * depth
    num_steps = num_gained = 0
    ends = time.monotonic() + most_seconds
    while time.monotonic() < ends and (outcome := engine.step()) is not None:
        for gain in outcome.gains:
            if not gain.self_drafted:
                continue
            num_steps += 1
            num_gained += len(gain.sampled.token_ids)
            for i in range(min(gain.sampled.num_accepted + 1, len(gain.self_drafted))):
                turns[i] += 1
                accepted[i] += i < gain.sampled.num_accepted
    for sequence in sequences:
        engine.scheduler.remove(sequence)
    engine.blocks.take_events()
    by_depth = [kept / max(1, seen) for kept, seen in zip(accepted, turns, strict=True)]
    return Trial(by_depth, num_gained / max(1, num_steps))


def try_head(target: str, head: str, prompts: Tokens[Tokens[int]], depth: int, num_tokens: int) -> Trial:
    """The same with a head, in an engine of its own. Raises StartupError if it cannot be served."""
    model = CausalLM.load(target)
    make_drafter = load_head(head, model)
    engine = Engine(model, _Settings(model=target, port=0), verify)
    engine.warm_up()
    engine.draft_by(SelfDrafting.of(engine, make_drafter(engine)))
    return try_drafter(engine, prompts, depth, num_tokens)
