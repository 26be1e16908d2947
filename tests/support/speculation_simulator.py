"""A discrete-event simulation of router, target and drafter that runs the router's real γ policy.

The workers batch as the real ones do: whatever is there when a step begins is in it, decodes and
verifications first, then prefill chunks within the token budget. The truth that the policy has to find out
(step costs, noise, acceptance) is the simulation's own; it is told only what workers report.

Runs with the same seed differ by little more than what is drafted (common random numbers): the same requests come, the
same tokens of their texts are easy for the drafter, and the machines drift and stall at the same times.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.target.gathering import Gathering
from shared.policy.drafting import Situation
from shared.policy.gamma import GammaController
from shared.policy.pace import Pace, steps_ahead
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_costs import StepCosts

_MEASURED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128)
_BUDGET = 512
_DRIFT_SECONDS = 0.1
_MOST_NODES = 16
# Rows of a tree's level in a step of the drafter.
_TREE_WIDTH = 8


@dataclass(frozen=True)
class Machine:
    """What steps truly cost. `one_token`: seconds of a target step of one token; it grows with arithmetic
    from about `knee` tokens on, and by the same again for every `attention` tokens of context. The drafter
    costs `draft_ratio` of it. `shared`: both run on the same cores. `transport`: seconds from process to process."""

    draft_ratio: float
    one_token: float = 0.03
    knee: float = 64.0
    attention: float = 200_000.0
    shared: bool = False
    transport: float = 0.001
    # Multiplicative noise of a step; and every so many seconds, on average, each machine stands still for as long as
    # 2 to 9 steps of one token take.
    sigma: float = 0.08
    stall_every: float = 6.0

    def seconds(self, num_tokens: int, context: int) -> float:
        growth: float = (1 + (num_tokens / self.knee) ** 4) ** 0.25 + context / self.attention
        return self.one_token * growth


@dataclass(frozen=True)
class Workload:
    """Streams that each send a request, and the next when it has ended. `load` and `acceptance`: by time."""

    load: Callable[[float], int]
    acceptance: Callable[[float], float]
    num_prompt_tokens: int
    output_tokens: tuple[int, int] = (64, 256)
    seconds: float = 60.0
    # Of the tokens that a chain misses, the share that trees of three tokens a depth miss as well; None: there are no
    # trees.
    tree_misses: float | None = None


@dataclass(eq=False)
class _Lane:
    pace: Pace
    num_output_wanted: int
    alpha_offset: float
    text: random.Random
    prompt_left: int
    num_context: int
    num_output: int = 0
    ease: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_seen: int = 0
    verifying: Shape = PLAIN
    asked: Shape = PLAIN
    drawn: int = 0
    in_shadow: bool = False
    catching_up: int = 0
    asked_unseen: int = 0
    asked_beside_prompts: bool = False
    received: float = 0.0
    received_prefill: float = 0.0
    seconds: float = 0.0
    in_step: int = 0


class _Drift:
    """How slow the machine is, by time: a random walk, the same whatever runs on it."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._path = [1.0]

    def at(self, now: float) -> float:
        while len(self._path) <= now / _DRIFT_SECONDS:
            self._path.append(min(1.2, max(0.9, self._path[-1] * self._dice.lognormvariate(0, 0.02))))
        return self._path[int(now / _DRIFT_SECONDS)]


class _Stalls:
    """When a machine stands still, by time: the same whatever runs on it."""

    def __init__(self, seed: int, machine: Machine) -> None:
        self._dice = random.Random(seed)
        self._machine = machine
        # Of each stall: its begin, its end, and how long those before it took together.
        self._begin, self._end, self._before = [0.0], [0.0], [0.0]

    def running(self, since: float, until: float) -> float:
        """Seconds of that time in which it ran."""
        return until - since - (self._stalled(until) - self._stalled(since))

    def after(self, now: float, seconds: float) -> float:
        """When it will have run for so long."""
        until = now + seconds
        while (missing := seconds - self.running(now, until)) > 1e-12:
            until += missing
        return until

    def _stalled(self, until: float) -> float:
        """Seconds it has stood still by then."""
        while self._begin[-1] <= until:
            begin = self._end[-1] + self._dice.expovariate(1 / self._machine.stall_every)
            self._begin.append(begin)
            self._end.append(begin + self._dice.uniform(2, 9) * self._machine.one_token)
            self._before.append(self._before[-1] + self._end[-2] - self._begin[-2])
        last = bisect.bisect_right(self._begin, until) - 1
        return self._before[last] + min(until, self._end[last]) - self._begin[last]


@dataclass(eq=False)
class _Server:
    """A worker's engine: at most one step at a time, with so much work left."""

    stalls: _Stalls
    left: float = 0.0
    began: float = 0.0
    num_tokens: int = 0
    lanes: list[_Lane] = field(default_factory=list)
    busy: bool = False
    version: int = 0


class Simulation:
    """One run. `tokens` counts the output; `trace` holds when each result came, and the γ of its round."""

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        seed: int,
        fixed: Shape | None = None,
        slow: tuple[float, float, float] = (0.0, 0.0, 1.0),
    ) -> None:
        """`fixed`: the shape of every round, None for the controller. `slow`: from, until, times as slow."""
        self.machine, self.workload, self.slow = machine, workload, slow
        self.dice = random.Random(seed)
        self.texts = random.Random(seed + 2)
        self.now = 0.0
        self.gathering = Gathering(lambda: self.now)
        self.fixed = fixed
        bias = random.Random(seed + 1)
        costs = [
            StepCosts([(n, machine.seconds(n, 0) * scale * bias.lognormvariate(0, 0.1)) for n in _MEASURED_SIZES])
            for scale in (1.0, machine.draft_ratio)
        ]
        self.costs = costs[0]
        self.controller = GammaController(
            costs[0], costs[1], 8, lambda: self.now, 0 if workload.tree_misses is None else _MOST_NODES
        )
        self.tokens = 0
        self.measured_from = float("inf")
        self.num_started = 0
        self.trace: list[tuple[float, int]] = []
        self.lanes: list[_Lane] = []
        self.prefills: deque[_Lane] = deque()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.drift = _Drift(seed + 3)
        stalls = _Stalls(seed + 4, machine)
        self.target = _Server(stalls)
        self.drafter = _Server(stalls if machine.shared else _Stalls(seed + 5, machine))
        self.progressed = 0.0
        self.prefill_seconds = 0.0

    def run(self) -> float:
        """Output tokens a second, over the time that begins when every stream has had its first token: all
        streams begin at once, and the wave of their prompts says nothing about γ."""
        self.at(0.0, self.arrive)
        for second in range(1, int(self.workload.seconds)):
            self.at(float(second), self.arrive)
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            if self.now >= self.measured_from + self.workload.seconds:
                break
            act()
        return self.tokens / self.workload.seconds

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), act))

    def arrive(self) -> None:
        """As many streams as there should be now; those too many end with their request."""
        while len(self.lanes) < self.workload.load(self.now):
            prompt = self.workload.num_prompt_tokens
            lane = _Lane(
                Pace(self.controller.acceptance, self.fixed, coupled=True),
                self.texts.randint(*self.workload.output_tokens),
                self.texts.gauss(0, 0.04),
                random.Random(self.texts.random()),
                prompt,
                prompt,
            )
            lane.num_steps = 1
            lane.received = self.now
            self.lanes.append(lane)
            self.prefills.append(lane)
        self.at(self.now + self.machine.transport, self.step_target)

    # Workers

    def step_target(self) -> None:
        if self.target.busy:
            return
        lanes, tokens, context = [], 0, 0
        for lane in self.lanes:
            lane.in_step = 0
            if lane.prompt_left == 0 and lane.num_steps > 0 and lane.num_output < lane.num_output_wanted:
                lane.in_step = lane.verifying.num_verified + 1
                tokens += lane.in_step
                context += lane.num_context
                lanes.append(lane)
        for lane in self.prefills:
            if tokens >= _BUDGET:
                break
            lane.in_step = min(lane.prompt_left, _BUDGET - tokens)
            tokens += lane.in_step
            context += lane.num_context
            lanes.append(lane)
        wait = self.gathering.seconds_to_wait(len(lanes), self.machine.seconds(tokens, context))
        if wait > 0:
            self.at(self.now + wait, self.step_target)
            return
        if lanes:
            self.begin(self.target, lanes, tokens, self.machine.seconds(tokens, context), self.end_target_step)

    def step_drafter(self) -> None:
        if self.drafter.busy:
            return
        lanes, tokens, context = [], 0, 0
        for lane in self.lanes:
            if lane.catching_up or lane.asked != PLAIN:
                level = min(lane.asked.num_nodes, _TREE_WIDTH) if lane.asked.is_tree and lane.drawn else 1
                lane_tokens = min(max(lane.catching_up, level), _BUDGET - tokens)
                if lane_tokens <= 0:
                    break
                tokens += lane_tokens
                context += lane.num_context
                lanes.append(lane)
                if lane.catching_up:
                    lane.catching_up -= min(lane_tokens, lane.catching_up)
        if lanes:
            seconds = self.machine.draft_ratio * self.machine.seconds(tokens, context)
            self.begin(self.drafter, lanes, tokens, seconds, self.end_draft_step)

    def begin(self, server: _Server, lanes: list[_Lane], tokens: int, seconds: float, end: Callable[[], None]) -> None:
        seconds *= self.drift.at(self.now) * self.dice.lognormvariate(0, self.machine.sigma)
        if self.slow[0] <= self.now < self.slow[1]:
            seconds *= self.slow[2]
        self.progress()
        server.busy, server.left, server.began = True, seconds, self.now
        server.lanes, server.num_tokens = lanes, tokens
        self.reschedule()

    def progress(self) -> None:
        """Takes off the work done since the last change."""
        both = self.target.busy and self.drafter.busy and self.machine.shared
        for server in (self.target, self.drafter):
            if server.busy:
                server.left -= server.stalls.running(self.progressed, self.now) * (0.5 if both else 1.0)
        self.progressed = self.now

    def reschedule(self) -> None:
        both = self.target.busy and self.drafter.busy and self.machine.shared
        for server, end in ((self.target, self.end_target_step), (self.drafter, self.end_draft_step)):
            if server.busy:
                server.version += 1
                version = server.version

                def finish(server: _Server = server, version: int = version, end: Callable[[], None] = end) -> None:
                    if server.version == version:
                        self.progress()
                        server.busy = False
                        server.version += 1
                        end()
                        self.reschedule()

                self.at(server.stalls.after(self.now, max(0.0, server.left) * (2.0 if both else 1.0)), finish)

    def end_target_step(self) -> None:
        seconds, num_tokens = self.now - self.target.began, self.target.num_tokens
        results = []
        num_decoding = len(self.lanes) - len(self.prefills)
        num_prompt = 0
        for lane in self.target.lanes:
            if lane.prompt_left:
                lane.prompt_left -= lane.in_step
                num_prompt += lane.in_step
                if lane.prompt_left:
                    continue
                self.prefills.remove(lane)
                self.num_started += 1
                if self.num_started == self.workload.load(0.0):
                    self.measured_from, self.tokens = self.now, 0
                path: list[bool] = []
                shape = PLAIN
            else:
                shape = lane.verifying
                path = self.accept(lane, shape)
            lane.verifying = PLAIN
            lane.num_steps -= 1
            gained = min(len(path) + 1, lane.num_output_wanted - lane.num_output)
            lane.num_output += gained
            lane.num_context += gained
            self.tokens += gained
            if shape != PLAIN and lane.num_steps == 0 and lane.num_output < lane.num_output_wanted:
                self.gathering.left(lane)
            results.append((lane, shape, path))
        self.prefill_seconds += self.costs.seconds_of_prompts(num_tokens, num_prompt, num_decoding, seconds)
        prefill = self.prefill_seconds
        self.at(self.now + self.machine.transport, lambda: self.receive(results, prefill))
        self.step_target()

    def accept(self, lane: _Lane, shape: Shape) -> list[bool]:
        """Those accepted behind the output: of each, whether a chain would have had it. That is up to its place in the
        text."""
        gamma = shape.num_draft_tokens
        while len(lane.ease) < lane.num_output + gamma:
            lane.ease.append(lane.text.random())
        alpha = min(0.99, max(0.0, self.workload.acceptance(self.now) + lane.alpha_offset))
        misses = self.workload.tree_misses if shape.is_tree else None
        if misses is not None:
            misses **= math.log(shape.num_nodes / gamma, 3)
        alpha_of_shape = alpha if misses is None else 1 - misses * (1 - alpha)
        drafted = lane.ease[lane.num_output : lane.num_output + gamma]
        return [ease < alpha for ease in itertools.takewhile(lambda ease: ease < alpha_of_shape, drafted)]

    def end_draft_step(self) -> None:
        proposals = []
        for lane in self.drafter.lanes:
            if lane.catching_up == 0 and lane.asked != PLAIN:
                lane.drawn += 1
                if lane.drawn < lane.asked.num_draft_tokens:
                    continue
                if lane.in_shadow:
                    num_accepted = len(self.accept(lane, lane.asked))
                    lane.pace.drafting.observe_in_shadow(lane.asked.num_draft_tokens, num_accepted)
                    lane.in_shadow = False
                else:
                    proposals.append((lane, lane.asked))
                lane.asked, lane.drawn = PLAIN, 0
        if proposals:

            def forward() -> None:
                for lane, shape in proposals:

                    def arrive(lane: _Lane = lane, shape: Shape = shape) -> None:
                        lane.verifying = shape
                        lane.num_steps += 1
                        self.gathering.returned(lane)

                    self.at(self.now + self.machine.transport, arrive)
                self.at(self.now + self.machine.transport, self.step_target)

            self.at(self.now + self.machine.transport, forward)
        self.step_drafter()

    # Router

    def receive(self, results: list[tuple[_Lane, Shape, list[bool]]], prefill: float) -> None:
        asked = False
        for lane, shape, path in results:
            load = len(self.lanes)
            decoding = load - len(self.prefills)
            lane.seconds = self.now - lane.received - (prefill - lane.received_prefill)
            mostly_prompts = prefill - lane.received_prefill > lane.seconds
            lane.received, lane.received_prefill = self.now, prefill
            self.trace.append((self.now, shape.num_draft_tokens))
            if shape != PLAIN:
                if shape.is_tree:
                    rows, nodes = _as_tree(path, shape)
                    lane.pace.drafting.observe_tree(rows, nodes, shape, False, self.controller.trees)
                else:
                    lane.pace.drafting.acceptance.observe(shape.num_draft_tokens, len(path))
                if not lane.asked_beside_prompts:
                    unseen, seconds = lane.asked_unseen, lane.seconds
                    self.controller.observe_round(decoding, shape, unseen, seconds, mostly_prompts)
            elif lane.num_output > 1:
                self.controller.observe_plain(decoding, lane.seconds, self.now, mostly_prompts=mostly_prompts)
            if lane.num_output >= lane.num_output_wanted:
                self.controller.leave(lane.pace.drafting, lane.num_output)
                self.lanes.remove(lane)
                continue
            unseen = lane.num_context - lane.num_seen
            situation = Situation(
                load - len(self.prefills),
                len(self.prefills),
                sum(each.prompt_left for each in self.prefills),
                unseen,
                lane.num_output,
                self.workload.output_tokens[1] - lane.num_output,
                lane.received,
                lane.received_prefill,
            )
            num_ahead = steps_ahead(self.machine.one_token)
            move = lane.pace.next(None if lane.in_shadow else self.controller, situation, lane.num_steps, num_ahead)
            if lane.pace.drafting.num_scouting_rounds and not lane.in_shadow and not move.catch_up:
                lane.catching_up += unseen
                lane.num_seen = lane.num_context
                lane.asked, lane.drawn, lane.in_shadow = Shape(lane.pace.drafting.num_scouting_tokens), 0, True
                asked = True
            if move.shape != PLAIN or move.catch_up:
                lane.catching_up += unseen - (0 if move.shape != PLAIN else 1)
                lane.num_seen = lane.num_context
                asked = True
            if move.shape != PLAIN:
                lane.asked, lane.asked_unseen, lane.drawn = move.shape, unseen, 0
                lane.asked_beside_prompts = situation.prefill_bound
            if move.num_steps > 0:
                # It goes on without a draft, which nobody waits for any more.
                self.gathering.forget(lane)
            lane.num_steps += move.num_steps
        self.arrive()
        if asked:
            self.at(self.now + self.machine.transport, self.step_drafter)


def _as_tree(path: list[bool], shape: Shape) -> tuple[list[int], list[int]]:
    """A tree of that shape that has such a path: the row that each node follows, and the path's nodes. Of nodes behind
    the same row the first is what a chain has."""
    rows: list[int] = []
    nodes: list[int] = []
    row = 0
    for in_chain in path:
        rows += [row] * (1 if in_chain else 2)
        nodes.append(len(rows) - 1)
        row = len(rows)
    if len(path) < shape.num_draft_tokens:
        rows.append(row)
    return rows + [0] * (shape.num_nodes - len(rows)), nodes
