"""Where a request is prefilled and decoded: by predicted cost, in seconds that streams wait.

`candidates` picks the few workers worth a look, `choose` the cheapest plan among them. A plan's cost is the request's
own TTFT, what its stream loses after the first token, and the stream-seconds by which it delays others:

    cost = TTFT + delay + harm

A worker with n streams, of which the last have their prompts still ahead of ours (A tokens together), computes
c = budget - n prompt tokens a step beside its decodes; T(x) is what steps with x prompt tokens take, s(k) a step of k
tokens. With r tokens of our prompt left to compute:

    TTFT  = rest of the step under way + T(A + r), later if a fetched prefix is not here in time
    harm  = n (T(r) - ceil(r / c) s(n)) + n (O - 1) (s(n + 1) - s(n))
    delay = hand-off + (O - 1) (s(n + 1) - the least s(1) of any), and what being preempted would take

for O tokens of output. A prefix that a worker is computing for somebody else counts as held there: those tokens are
ahead of ours already. So a prefix is followed as long as it is worth the queue before it, copied to a second worker
(fetched or computed again, whichever is sooner) when it is not, and a long prompt leaves a busy decode worker alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from shared.policy.step_costs import StepCosts

Role = Literal["both", "prefill", "decode"]
# In place of a worker's id where a prefix is fetched from.
STORE = "store"

# Plans that cost more than the cheapest by no more than this share are as good: predictions err.
_NEAR_TIE = 0.03
# What counts of the harm to streams that run. Those that will queue behind this request lose time as well, more of it
# the longer the queue is, and are not in the sum. So the first token counts more: in simulations of mixed, long and
# bursty loads, with separate pools and without, all requests together wait least with about this weight.
_HARM_WEIGHT = 0.25
# How much a measured transfer counts against those before it, and how far off it may be (in logarithms).
_RATE_WEIGHT = 0.2
# After a transfer that failed no other is made between the two for so long, doubled with each failure in a row.
_PAUSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 60.0
_MOST_ERROR = 1.0


class NoWorker(Exception):
    """None of the workers can decode."""


class Request(NamedTuple):
    """What is to be placed: prompt tokens, output tokens expected, and leading prompt tokens that the store holds."""

    num_tokens: int
    num_output_tokens: float
    store_tokens: int = 0


class WorkerView(NamedTuple):
    """What is known of a worker when a request is placed.

    `num_decoding`: sequences past their first token, those being handed over to it included; `num_waiting`: those
    without one yet, whose prompts have `backlog_tokens` together that were sent and are not computed. `kv_usage`: share
    of its room for `kv_tokens` tokens that sequences own, 0 to 1. `prefix_tokens`: leading tokens of this prompt whose
    KV it holds; `coming_tokens`: that it will hold when those ahead are computed.
    """

    worker_id: str
    role: Role
    costs: StepCosts
    max_batch_tokens: int
    kv_tokens: int
    num_decoding: int = 0
    num_waiting: int = 0
    backlog_tokens: int = 0
    kv_usage: float = 0.0
    prefix_tokens: int = 0
    coming_tokens: int = 0

    @property
    def held_tokens(self) -> int:
        """Leading tokens that it holds by the turn of this prompt."""
        return max(self.prefix_tokens, self.coming_tokens)


class Plan(NamedTuple):
    """Where a request goes, and what that should take, in seconds.

    `prefill`: the worker that prefills and draws the first token; None: the one that decodes, in chunks beside its
    decodes. Before that it fetches `fetch_tokens` leading tokens' KV from `fetch`: a worker, STORE, or None.
    `transfer_seconds`: of that and of the hand-off between the two. `delay`: what the stream loses after its first
    token. `harm`: stream-seconds that others lose.
    """

    decode: str
    prefill: str | None
    fetch: str | None
    fetch_tokens: int
    ttft: float
    transfer_seconds: float
    delay: float
    harm: float

    @property
    def cost(self) -> float:
        return self.ttft + self.delay + _HARM_WEIGHT * self.harm


class TransferRates:
    """Seconds that KV takes from worker to worker, and from the store: measured, with a prior.

    A transfer of b bytes takes fixed_seconds + b / rate.
    """

    def __init__(
        self,
        bytes_per_token: float,
        fixed_seconds: float,
        bytes_per_second: float,
        store_bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_per_second`, from the store if it differs: before a pair was measured. `clock`: in seconds."""
        self._bytes_per_token = bytes_per_token
        self._fixed_seconds = fixed_seconds
        self._prior = bytes_per_second
        self._store_prior = bytes_per_second if store_bytes_per_second is None else store_bytes_per_second
        self._rates: dict[tuple[str, str], float] = {}
        self._clock = clock
        # Pairs whose latest transfer failed: until when none is made, and how long that was.
        self._pauses: dict[tuple[str, str], tuple[float, float]] = {}

    def seconds(self, source: str, destination: str, num_tokens: int) -> float:
        """What the KV of that many tokens takes; nothing takes nothing. Infinity for some time after a failure."""
        if num_tokens <= 0:
            return 0.0
        until, _ = self._pauses.get((source, destination), (0.0, 0.0))
        if self._clock() < until:
            return math.inf
        return self._fixed_seconds + num_tokens * self._bytes_per_token / self.rate(source, destination)

    def rate(self, source: str, destination: str) -> float:
        """Bytes a second from one worker, or STORE, to another."""
        prior = self._store_prior if source == STORE else self._prior
        return self._rates.get((source, destination), prior)

    def observe(self, source: str, destination: str, num_bytes: int, seconds: float) -> None:
        """A transfer took that long. One that the fixed seconds make up more than half of says nothing of the rate."""
        self._pauses.pop((source, destination), None)
        if num_bytes <= 0 or seconds <= 2 * self._fixed_seconds:
            return
        before = self.rate(source, destination)
        error = math.log(num_bytes / (seconds - self._fixed_seconds) / before)
        step = _RATE_WEIGHT * min(max(error, -_MOST_ERROR), _MOST_ERROR)
        self._rates[source, destination] = before * math.exp(step)

    def failed(self, source: str, destination: str) -> None:
        """A transfer brought nothing. The next one is a trial: if it fails too, it is waited for twice as long."""
        _, pause = self._pauses.get((source, destination), (0.0, _PAUSE_SECONDS / 2))
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)
        self._pauses[source, destination] = self._clock() + pause, pause

    def forget(self, worker_id: str) -> None:
        """The worker is gone for good."""
        self._rates = {pair: rate for pair, rate in self._rates.items() if worker_id not in pair}
        self._pauses = {pair: pause for pair, pause in self._pauses.items() if worker_id not in pair}


def by_depth(prefix_tokens: Mapping[str, int]) -> list[list[str]]:
    """Holders of a prefix, those with as many tokens together, deepest first; those with none are left out."""
    levels: dict[int, list[str]] = {}
    for worker_id, num_tokens in prefix_tokens.items():
        if num_tokens > 0:
            levels.setdefault(num_tokens, []).append(worker_id)
    return [levels[depth] for depth in sorted(levels, reverse=True)]


def candidates(
    holders: Iterable[Sequence[str]],
    pools: Iterable[Sequence[str]],
    rng: random.Random,
    *,
    num_holders: int = 3,
    num_sampled: int = 4,
) -> list[str]:
    """The workers worth a look: of the prompt's `holders` the deepest, and a few of each pool by chance.

    `holders`: as `by_depth` gives them; those equally deep are drawn by chance. `pools`: the workers of each role. What
    this costs does not grow with the pool, and a few random choices balance nearly as well as a look at all: the power
    of d choices (Mitzenmacher 2001).
    """
    found: dict[str, None] = {}
    for level in holders:
        room = num_holders - len(found)
        if room <= 0:
            break
        found.update(dict.fromkeys(_sample(level, room, rng)))
    for pool in pools:
        found.update(dict.fromkeys(_sample(pool, num_sampled, rng)))
    return list(found)


def choose(request: Request, workers: Sequence[WorkerView], rates: TransferRates, rng: random.Random) -> Plan:
    """The cheapest plan. Of plans that nearly tie two are drawn, and the one on workers with fewer streams is taken,
    so that routers with the same stale view do not all rush to one worker. Raises NoWorker if none can decode."""
    found = plans(request, workers, rates)
    least = min(plan.cost for plan in found)
    limit = least + _NEAR_TIE * abs(least)
    near = [plan for plan in found if plan.cost <= limit]
    if len(near) == 1:
        return near[0]
    loads: dict[str | None, int] = {each.worker_id: each.num_decoding + each.num_waiting for each in workers}
    loads[None] = 0
    return min(rng.sample(near, 2), key=lambda plan: (loads[plan.decode] + loads[plan.prefill], plan.transfer_seconds))


def plans(request: Request, workers: Sequence[WorkerView], rates: TransferRates) -> list[Plan]:
    """The best plan for each worker, and pair of workers, that could serve the request. Raises NoWorker if none can.

    Where there are prefill workers, those of role both may prefill for others, too.
    """
    decoders = [worker for worker in workers if worker.role != "prefill"]
    if not decoders:
        raise NoWorker("none of the workers can decode")
    fastest = min(worker.costs.seconds(1) for worker in decoders)
    joins = [_Join(request, worker, fastest) for worker in decoders]
    deepest = max(worker.prefix_tokens for worker in workers)
    sources = [worker for worker in workers if worker.prefix_tokens == deepest] if deepest > 0 else []
    found = []
    for join in joins:
        prefill = _prefill(request, join.worker, join.speed, sources, rates)
        found.append(
            Plan(
                decode=join.worker.worker_id,
                prefill=None,
                fetch=prefill.fetch,
                fetch_tokens=prefill.fetch_tokens,
                ttft=prefill.ttft + join.room_seconds,
                transfer_seconds=prefill.fetch_seconds,
                delay=join.delay,
                harm=prefill.harm + join.harm,
            )
        )
    if all(worker.role != "prefill" for worker in workers):
        return found
    for worker in workers:
        if worker.role == "decode":
            continue
        prefill = _prefill(request, worker, _Speed(worker), sources, rates)
        for join in joins:
            if join.worker is worker:
                continue
            num_tokens = request.num_tokens - join.worker.prefix_tokens
            hand_off = rates.seconds(worker.worker_id, join.worker.worker_id, num_tokens)
            found.append(
                Plan(
                    decode=join.worker.worker_id,
                    prefill=worker.worker_id,
                    fetch=prefill.fetch,
                    fetch_tokens=prefill.fetch_tokens,
                    ttft=prefill.ttft,
                    transfer_seconds=prefill.fetch_seconds + hand_off,
                    delay=join.room_seconds + hand_off + join.entry_seconds + join.delay,
                    harm=prefill.harm + join.harm,
                )
            )
    return found


class _Speed:
    """How fast a worker gets on with prompts beside its streams, those that wait for their first token included."""

    __slots__ = ("_ahead", "_chunk", "_costs", "_full_seconds", "num_streams", "rest_seconds", "step_seconds")

    def __init__(self, worker: WorkerView) -> None:
        costs = worker.costs
        # Who waits on a prefill worker leaves with the first token.
        waiting = worker.num_waiting if worker.role != "prefill" else 0
        under_way = min(worker.backlog_tokens, max(1, worker.max_batch_tokens - worker.num_decoding))
        in_step = worker.num_decoding + under_way
        self._costs = costs
        self._ahead = worker.backlog_tokens - under_way
        # Of the step under way, half is left on average.
        self.rest_seconds = 0.5 * costs.seconds(in_step) if in_step else 0.0
        self.num_streams = worker.num_decoding + waiting
        self._chunk = max(1, worker.max_batch_tokens - self.num_streams)
        self._full_seconds = costs.seconds(self.num_streams + self._chunk)
        self.step_seconds = costs.seconds(self.num_streams) if self.num_streams else 0.0

    def seconds(self, num_tokens: float) -> float:
        """T: steps that hold so many prompt tokens."""
        num_full, rest = divmod(num_tokens, self._chunk)
        return num_full * self._full_seconds + (self._costs.seconds(self.num_streams + rest) if rest else 0.0)

    def first_token(self, num_tokens: int, fetch_seconds: float) -> float:
        """Seconds until that many more are computed, of a prompt whose prefix takes so long to fetch."""
        turn = self.rest_seconds + self._ahead // self._chunk * self._full_seconds
        late = max(0.0, fetch_seconds - turn)
        return self.rest_seconds + self.seconds(self._ahead + num_tokens) + late

    def harm(self, num_tokens: int) -> float:
        """Stream-seconds by which computing them delays the streams there."""
        if not self.num_streams:
            return 0.0
        num_steps = -(-num_tokens // self._chunk)
        # Measured costs may fall where they should rise: nobody gains by others' prompts.
        return self.num_streams * max(0.0, self.seconds(num_tokens) - num_steps * self.step_seconds)


class _Prefill(NamedTuple):
    """A way to compute a prompt on a worker, and what it takes; the parts as in Plan."""

    ttft: float
    harm: float
    fetch: str | None
    fetch_tokens: int
    fetch_seconds: float


def _prefill(
    request: Request, worker: WorkerView, speed: _Speed, sources: Sequence[WorkerView], rates: TransferRates
) -> _Prefill:
    """The best way: with what the worker holds, or with a longer prefix fetched first, from `sources` or the store."""
    here, held = worker.worker_id, worker.held_tokens
    # The last token is always computed: its logits are what the first of the output is drawn from.
    most = request.num_tokens - 1

    def take(fetch: str | None, num_tokens: int, seconds: float) -> _Prefill:
        num_left = max(1, request.num_tokens - held - num_tokens)
        return _Prefill(speed.first_token(num_left, seconds), speed.harm(num_left), fetch, num_tokens, seconds)

    best = take(None, 0, 0.0)
    ways = []
    if sources and (num_tokens := min(sources[0].prefix_tokens, most) - held) > 0:
        seconds, peer = min((rates.seconds(each.worker_id, here, num_tokens), each.worker_id) for each in sources)
        ways.append(take(peer, num_tokens, seconds))
    if (num_tokens := min(request.store_tokens, most) - held) > 0:
        ways.append(take(STORE, num_tokens, rates.seconds(STORE, here, num_tokens)))
    for way in ways:
        if way.ttft + _HARM_WEIGHT * way.harm < best.ttft + _HARM_WEIGHT * best.harm:
            best = way
    return best


class _Join:
    """What one more stream on a worker takes: from itself (`delay`) and from the others there (`harm`).

    `room_seconds`: until there are blocks for its prompt. `entry_seconds`: until a step begins that it can be in.
    """

    __slots__ = ("delay", "entry_seconds", "harm", "room_seconds", "speed", "worker")

    def __init__(self, request: Request, worker: WorkerView, fastest: float) -> None:
        """`fastest`: seconds that a token takes at best, anywhere."""
        self.worker = worker
        self.speed = speed = _Speed(worker)
        num_steps = max(0.0, request.num_output_tokens - 1)
        together = worker.costs.seconds(speed.num_streams + 1)
        self.harm = speed.num_streams * num_steps * max(0.0, together - speed.step_seconds)
        self.entry_seconds = speed.rest_seconds
        self.delay = num_steps * max(0.0, together - fastest)
        self.room_seconds = 0.0
        # Who waits there has been promised blocks, too.
        num_taken = worker.kv_usage * worker.kv_tokens + worker.backlog_tokens
        missing = request.num_tokens - worker.held_tokens + num_steps - (worker.kv_tokens - num_taken)
        if missing > 0:
            # The streams there are taken to last as long as this one, and to hold as much as each other.
            num_streams = max(1, speed.num_streams)
            until_next_ends = max(1.0, num_steps) * together / num_streams
            num_released = max(1.0, num_taken / num_streams)
            missing_later = min(missing, num_steps)
            self.room_seconds = math.ceil((missing - missing_later) / num_released) * until_next_ends
            if missing_later:
                # The youngest is preempted, and computed again when there is room.
                again = missing_later / num_steps * speed.seconds(request.num_tokens + num_steps)
                self.delay += missing_later / num_released * until_next_ends + again


def _sample(population: Sequence[str], size: int, rng: random.Random) -> Sequence[str]:
    return population if len(population) <= size else rng.sample(population, size)
