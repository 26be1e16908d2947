"""EAGLE heads: a layer that goes on from what the target saw, token by token (Li et al. 2024, 2025)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.accepted import kept_tokens
from shared.self_drafting.drafter import Growing

# Tokens in a line, at most.
_MOST_STEPS = 8
# What the target saw of so many tokens may wait until the sequence drafts: plain steps need no head.
_MOST_PENDING = 32


# Query, key and value `[..., heads, head_dim]`, not turned by their positions yet, to what they attend to, as queries.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleShape(NamedTuple):
    """What a head is made of.

    `kind`: eagle, whose input is what the target's head sees, beside a token; or eagle3, which is given several
    layers' states. `captured_layers`: see `CausalLM.capture`. `norms_input`: whether what comes to attention is
    normalised; `norm_before_residual`: of an eagle3, whether what goes past attention is; `norms_token`: of an eagle,
    whether the token is. `draft_vocab_size`: tokens that it has logits for.
    """

    kind: str
    config: LlamaConfig
    captured_layers: tuple[int, ...]
    target_hidden: int
    head_dim: int
    num_kv_heads: int
    draft_vocab_size: int
    norms_input: bool = False
    norms_token: bool = False
    norms_output: bool = False
    norm_before_residual: bool = False
    fuse_bias: bool = False
    attention_bias: bool = False
    own_embedding: bool = False
    own_out: bool = False


class EagleHead(nn.Module):
    """One layer, over what is fused from the target's states, or from the head's own where it goes on.

    Its KV at position i is of the token at i + 1 beside what was seen at i. `token_ids`: which tokens the logits are,
    where the head's vocabulary is not the target's. `rotary`: cosines and sines of positions, once it is loaded.
    """

    token_ids: Tensor | None

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        config, hidden = shape.config, shape.config.hidden_size
        eagle3 = shape.kind == "eagle3"
        heads, kv_heads, dim = config.num_attention_heads, shape.num_kv_heads, shape.head_dim
        self.embedding = nn.Embedding(config.vocab_size, hidden) if shape.own_embedding else None
        fused = len(shape.captured_layers) * shape.target_hidden if eagle3 else 2 * hidden
        self.fuse = nn.Linear(fused, hidden, bias=shape.fuse_bias)
        self.token_norm = nn.RMSNorm(hidden, config.rms_norm_eps) if eagle3 or shape.norms_token else None
        self.input_norm = nn.RMSNorm(hidden, config.rms_norm_eps) if eagle3 or shape.norms_input else None
        self.qkv = nn.Linear(2 * hidden if eagle3 else hidden, (heads + 2 * kv_heads) * dim, bias=shape.attention_bias)
        self.attention_out = nn.Linear(heads * dim, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.mlp_out = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.output_norm = nn.RMSNorm(hidden, config.rms_norm_eps) if eagle3 or shape.norms_output else None
        self.out = nn.Linear(hidden, shape.draft_vocab_size, bias=False) if shape.own_out else None
        self.register_buffer("token_ids", None)
        self.rotary: nn.Module | None = None

    def see(self, captured: Tensor) -> Tensor:
        """What it makes of the target's states, `[T, layers, target_hidden]` to `[T, hidden]`."""
        if self.shape.kind != "eagle3":
            return captured[:, 0]
        fused: Tensor = self.fuse(captured.flatten(1))
        return fused

    def layer(self, embedded: Tensor, seen: Tensor, attend: Attend) -> Tensor:
        """`[..., hidden]`: what the target will have seen at the tokens `embedded`, `seen` being what it saw before
        them."""
        if self.token_norm is not None:
            embedded = self.token_norm(embedded)
        if self.shape.kind == "eagle3":
            assert self.input_norm is not None
            normal = self.input_norm(seen)
            past = normal if self.shape.norm_before_residual else seen
            x = torch.cat([embedded, normal], dim=-1)
        else:
            past = self.fuse(torch.cat([embedded, seen], dim=-1))
            x = past if self.input_norm is None else self.input_norm(past)
        heads, kv_heads = self.shape.config.num_attention_heads, self.shape.num_kv_heads
        split = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.shape.head_dim))
        attended = attend(*torch.split(split, [heads, kv_heads, kv_heads], dim=-2))
        past = past + self.attention_out(attended.flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(past)).chunk(2, dim=-1)
        out: Tensor = past + self.mlp_out(functional.silu(gate) * up)
        return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `[..., dim]` by the angles that these are of."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@dataclass(slots=True)
class _Pending:
    """States of the target that the head has not taken in: of positions from `start` on, and the tokens behind them."""

    start: int
    captured: list[Tensor] = field(default_factory=list)
    following: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.following)


class _Seen(NamedTuple):
    """What the head made of the positions before `end`: of the last of them, and then of a tree's tokens by row,
    `[rows, hidden]`."""

    end: int
    outs: Tensor


class Eagle:
    """Drafts with a head that has a layer of KV in the target's own blocks: where these go, it goes.

    Prompts are taken in as they are computed, and what plain steps compute when there is enough of it, or the sequence
    drafts; a sequence that begins to decode, or would have to be taken in, while that is not worth its time is left out
    for good. Where it lacks KV (another worker computed the prefix without a head), it guesses worse, and no more.
    """

    most_steps = _MOST_STEPS
    uses_kv = True

    def __init__(self, head: EagleHead, model: CausalLM, pool: KVPool) -> None:
        self.source = head.shape.kind
        self._head = head
        self._model = model
        self._pool = pool
        assert head.rotary is not None
        self._rotary = head.rotary
        self._pending: WeakKeyDictionary[Sequence, _Pending] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Sequence, _Seen] = WeakKeyDictionary()
        # Of those that decode.
        self._followed: WeakSet[Sequence] = WeakSet()
        self._left_out: WeakSet[Sequence] = WeakSet()

    def observe(
        self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens], followed: Collection[Sequence]
    ) -> None:
        assert captured is not None
        if self._left_out.issuperset(item.sequence for item in plan.scheduled):
            return
        full: dict[Sequence, bool] = {}
        for item, places, following in kept_tokens(plan, sampled):
            sequence = item.sequence
            is_prompt = item.num_tokens > item.num_rows
            if not is_prompt and sequence not in self._followed:
                if sequence in self._left_out or sequence not in followed:
                    self._leave_out(sequence)
                    continue
                self._followed.add(sequence)
            pending = self._pending.get(sequence)
            if pending is None or pending.end != item.start:
                pending = self._pending[sequence] = _Pending(item.start)
            # Steps have their tokens one after another, but for what was accepted out of trees.
            in_a_row = places[-1] - places[0] == len(places) - 1
            rows = captured[places[0] : places[-1] + 1] if in_a_row else captured[places]
            pending.captured.append(rows.clone())
            pending.following += following
            if len(pending.following) > _MOST_PENDING:
                full[sequence] = is_prompt
        # Others may find a prompt in the cache, and go on from what the head made of it.
        self._take_in([sequence for sequence, is_prompt in full.items() if is_prompt or sequence in followed])
        for sequence in full:
            if sequence in self._pending:
                self._leave_out(sequence)

    def _leave_out(self, sequence: Sequence) -> None:
        self._left_out.add(sequence)
        self._followed.discard(sequence)
        self._pending.pop(sequence, None)
        self._seen.pop(sequence, None)

    def keeps_up(self, sequence: Sequence) -> bool:
        return sequence in self._followed

    def num_lacking(self, sequence: Sequence) -> int:
        return 0

    def follow(self, sequences: List[Sequence]) -> None:
        """What it was not given when it was computed is not to be had."""

    def ready(self, sequence: Sequence) -> bool:
        pending, seen = self._pending.get(sequence), self._seen.get(sequence)
        if pending is None and seen is None:
            return False  # of a prompt of one token a fork draws before anything was computed of it
        end = pending.end if pending is not None else seen.end if seen is not None else 0
        return end == len(sequence.token_ids) - 1

    def begin(self, sequences: List[Sequence]) -> Tensor:
        self._take_in([sequence for sequence in sequences if sequence in self._pending])
        return self._logits(torch.cat([self._seen[sequence].outs[:1] for sequence in sequences]))

    def extend(self, growing: List[Growing]) -> Tensor:
        seen = [self._seen[each.sequence] for each in growing]
        before = [
            its.outs[list(each.proposal.followed_rows()[each.first_row - 1 :])]
            for each, its in zip(growing, seen, strict=True)
        ]
        outs = self._run(
            [token for each in growing for token in each.proposal.token_ids[each.first_row - 1 :]],
            torch.cat(before),
            [len(each.sequence.token_ids) - 2 + each.first_row for each in growing],
            [each.num_new for each in growing],
            [each.sequence.block_table for each in growing],
            [each.proposal.parents for each in growing],
        )
        for each, its, new in zip(growing, seen, torch.split(outs, [each.num_new for each in growing]), strict=True):
            self._seen[each.sequence] = its._replace(outs=torch.cat([its.outs[: each.first_row], new]))
        return self._logits(outs)

    @torch.inference_mode()
    def _take_in(self, sequences: List[Sequence]) -> None:
        """Has the head see all that is pending of these."""
        if not sequences:
            return
        pending = [self._pending.pop(sequence) for sequence in sequences]
        captured = torch.cat([rows for each in pending for rows in each.captured])
        lengths = [len(each.following) for each in pending]
        outs = self._run(
            [token for each in pending for token in each.following],
            self._head.see(captured.to(self._model.dtype)),
            [each.start for each in pending],
            lengths,
            [sequence.block_table for sequence in sequences],
        )
        for sequence, each, its in zip(sequences, pending, torch.split(outs, lengths), strict=True):
            # Not a view, which would keep all of the step's.
            self._seen[sequence] = _Seen(each.end, its[-1:].clone())

    @torch.inference_mode()
    def _run(
        self,
        tokens: List[int],
        seen: Tensor,
        starts: List[int],
        lengths: List[int],
        tables: List[List[int]],
        parents: List[List[int]] | None = None,
    ) -> Tensor:
        """One forward of the head, packed as a step is: `[T, hidden]`."""
        batch = AttentionBatch.build(self._pool, starts, lengths, tables, self._model.attention_kernels, parents)
        ids = torch.tensor(tokens, device=self._model.device)
        embedded = self._model.embed(ids) if self._head.embedding is None else self._head.embedding(ids)
        positions = torch.from_numpy(batch.positions).to(self._model.device)
        cos, sin = (part[0].unsqueeze(1) for part in self._rotary(seen, positions.unsqueeze(0)))

        def attend_paged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scale = self._head.shape.head_dim**-0.5
            query, key = turn(query, cos, sin), turn(key, cos, sin)
            return attend(self._model.num_layers, query, key, value, batch, scale)

        return self._head.layer(embedded, seen, attend_paged)

    @torch.inference_mode()
    def _logits(self, outs: Tensor) -> Tensor:
        """`[R, vocab_size]`: minus infinity for tokens that the head has no logits for."""
        head = self._head
        normal = outs if head.output_norm is None else head.output_norm(outs)
        logits = self._model.project(normal) if head.out is None else head.out(normal)
        if head.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._model.vocab_size), -torch.inf)
        return whole.index_copy_(1, head.token_ids, logits)
