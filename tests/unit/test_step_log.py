"""Steps that are written down, read again, and what is found to have been their cost."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from services.simulator.cluster import Cluster, Pools
from services.simulator.costs import CostsError, linear_costs
from services.simulator.machine import ByKind, Machine
from services.simulator.step_fit import as_logged, fit_steps
from services.simulator.step_log import Step, read_step_log
from services.simulator.workload import Request
from services.target.step_log import StepLog
from shared.engine import sequence
from shared.engine.engine import StepOutcome
from shared.policy.placement import TransferRates
from shared.sampling.params import SamplingParams
from shared.settings import StartupError

PROMPT = sequence.Sequence([1] * 10, 10, SamplingParams(), b"")
OUTCOME = StepOutcome([], [], 12, 3, 1_700_000_000_250_000_000, 0.5, [(PROMPT, 10)], num_attended=(55, 200))
LINE = {
    "time": 1_700_000_000.25,
    "seconds": 0.5,
    "tokens": 12,
    "prefill_tokens": 10,
    "sequences": 3,
    "prefill_attended": 55,
    "context_tokens": 200,
}
# A step takes 20 ms, 1 ms more for each token, 2 µs for each that one of a prompt attends to, 5 for each of a context.
ATTENTION, CONTEXT = 2e-6, 5e-6


def base(num_tokens: float) -> float:
    return 0.02 + 0.001 * num_tokens


def seconds_of(num_prompt: int, start: int, contexts: Sequence[int]) -> float:
    attended = num_prompt * start + num_prompt * (num_prompt + 1) // 2
    return base(num_prompt + len(contexts)) + ATTENTION * attended + CONTEXT * sum(contexts)


def drawn_steps(seed: int, count: int, factor: float = 1.0) -> list[Step]:
    """Streams and chunks of prompts at random, with pauses between that are longer than any belongs to a step."""
    rng = random.Random(seed)
    steps, now = [], 1000.0 * rng.random()
    for _ in range(count):
        contexts = [rng.randrange(1, 4000) for _ in range(rng.randrange(1, 17))]
        num_prompt, start = rng.choice([(0, 0), (rng.randrange(16, 512), rng.randrange(2000))])
        taken = factor * seconds_of(num_prompt, start, contexts)
        attended = num_prompt * start + num_prompt * (num_prompt + 1) // 2
        num_sequences = len(contexts) + bool(num_prompt)
        steps.append(Step(now, taken, len(contexts) + num_prompt, num_prompt, num_sequences, attended, sum(contexts)))
        now += taken + 0.1
    return steps


# Written and read


def test_a_step_is_a_line_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        with closing(StepLog(path)) as log:
            log.write(OUTCOME)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [LINE, LINE]
    assert read_step_log(path) == [Step(**LINE)] * 2  # type: ignore[arg-type]


def test_a_log_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"step_log '.*' cannot be written: Is a directory"):
        StepLog(tmp_path)


def test_a_log_that_somebody_must_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StartupError, match="is no regular file"):
        StepLog(tmp_path / "fifo")


@pytest.mark.parametrize("room", [1.0, 2.5], ids=["between two lines", "within a line"])
def test_a_log_without_room_is_given_up_once(room: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path)) as log, caplog.at_level(logging.WARNING):
        log.write(OUTCOME)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(room * path.stat().st_size), limits[1]))
        try:
            for _ in range(4):
                log.write(OUTCOME)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage() for record in caplog.records] == ["step_log is given up: it cannot be written"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [LINE] * int(room)


def test_steps_are_read_by_their_time(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(json.dumps({**LINE, "time": time}) for time in (3.0, 1.0, 2.0)) + "\n\n")
    assert [step.time for step in read_step_log(path)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps({**LINE, "tokens": None}), "field tokens must be a number from 0 to 1e+15, not None"),
        (json.dumps({**LINE, "seconds": -1}), "field seconds must be a number from 0 to 1e+15, not -1"),
        (json.dumps({**LINE, "time": True}), "field time must be a number from 0 to 1e+15, not True"),
        (json.dumps(LINE).replace("0.5", "NaN"), "field seconds must be a number from 0 to 1e+15, not nan"),
        (json.dumps({**LINE, "sequences": 10**400}), "field sequences must be a number from 0 to 1e+15, not 1000"),
        (json.dumps({**LINE, "tokens": 0}), "field tokens must be at least 1, not 0"),
        (json.dumps({**LINE, "seconds": 0}), "field seconds must be more than 0, not 0"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(CostsError) as raised:
        read_step_log(path)
    assert str(raised.value).startswith(f"{path}, line 2: {complaint}")


def test_a_log_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="No such file"):
        read_step_log(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(CostsError, match="codec can't decode"):
        read_step_log(tmp_path / "binary")


# What they cost


def test_costs_are_found_again() -> None:
    fitted = fit_steps([drawn_steps(seed, 400) for seed in range(2)])
    assert fitted.num_steps == 800
    assert [fitted.costs.seconds(size) for size in (1, 8, 100, 400)] == pytest.approx(
        [base(size) for size in (1, 8, 100, 400)], rel=0.02
    )
    assert fitted.attention_seconds == pytest.approx(ATTENTION, rel=0.02)
    assert fitted.context_seconds == pytest.approx(CONTEXT, rel=0.02)
    assert fitted.beside_another == (1.0, 1.0)
    assert all(pstdev(ratios) < 0.01 for ratios in fitted.variation)


def test_what_lies_between_two_steps_belongs_to_the_first_unless_nothing_waited() -> None:
    # 10 ms for each step and 2 between; then a second in which there was nothing to do.
    times = [0.012 * i for i in range(50)] + [2.0 + 0.012 * i for i in range(50)]
    fitted = fit_steps([[Step(time, 0.01, 1, 0, 1, 0, 0) for time in times]])
    assert fitted.costs.seconds(1) == pytest.approx(0.012, rel=0.01)


def test_workers_of_one_machine_slow_each_other_down() -> None:
    """Decodes of one worker; half of them begin while the other computes a prompt, and take 1.5 times as long."""
    decodes, prompts, now = [], [], 0.0
    for turn in range(60):
        beside = turn % 2 == 1
        if beside:
            prompts.append(Step(now - 0.05, base(300), 300, 300, 1, 0, 0))
        decodes.append(Step(now, (1.5 if beside else 1.0) * base(4), 4, 0, 4, 0, 0))
        now += 1.0
    fitted = fit_steps([decodes, prompts], one_machine=True)
    assert fitted.beside_another.streams == pytest.approx(1.5, rel=0.01)
    assert fitted.beside_another.prompts == 1.0
    assert fitted.costs.seconds(4) == pytest.approx(base(4), rel=0.01)
    # On machines of their own the same steps are slower and faster for no reason.
    apart = fit_steps([decodes, prompts])
    assert apart.beside_another == (1.0, 1.0)
    assert apart.costs.seconds(4) == pytest.approx(1.25 * base(4), rel=0.05)
    assert sorted({round(ratio, 2) for ratio in apart.variation.streams}) == pytest.approx([0.8, 1.2], abs=0.05)


def test_more_tokens_never_cost_less() -> None:
    rng = random.Random(0)
    steps = [Step(i, rng.uniform(0.01, 0.1), rng.randrange(1, 300), 0, 1, 0, 0) for i in range(200)]
    costs = fit_steps([steps]).costs
    seconds = [costs.seconds(size) for size in range(1, 512)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(seconds))
    assert seconds[0] > 0


@pytest.mark.parametrize("count", [1, 2, 9])
def test_few_steps_cost_what_they_took(count: int) -> None:
    steps = [Step(10.0 * i, base(40 * i + 1), 40 * i + 1, 0, 1, 0, 0) for i in range(count)]
    fitted = fit_steps([steps])
    assert [fitted.costs.seconds(step.tokens) for step in steps] == pytest.approx(
        [step.seconds for step in steps], rel=0.2
    )


def test_without_steps_nothing_is_known() -> None:
    for num_logs in range(2):
        with pytest.raises(CostsError, match="no steps"):
            fit_steps([[]] * num_logs)


# Simulated


MACHINE = Machine(linear_costs(0.01, 25_000, 512), 512, 128, 4000, 16)


def ttfts(machine: Machine, seed: int = 0) -> list[float]:
    requests = [Request(10.0 * i, 300, 2) for i in range(400)]
    outcomes = Cluster(Pools(num_both=1), machine, TransferRates(1e5, 0.002, 1e9), seed=seed).run(requests)
    return list(outcomes.ttft)


def test_logged_steps_are_simulated() -> None:
    logged = as_logged(MACHINE, [drawn_steps(0, 800)])
    assert fmean(ttfts(logged)) == pytest.approx(seconds_of(300, 0, []), rel=0.03)
    assert (logged.num_blocks, logged.max_batch_tokens) == (MACHINE.num_blocks, MACHINE.max_batch_tokens)


def test_steps_vary_as_they_did() -> None:
    steps = drawn_steps(1, 600, 0.5) + [step._replace(time=step.time + 1e6) for step in drawn_steps(1, 600, 1.5)]
    varied = ttfts(as_logged(MACHINE, [steps]))
    expected = seconds_of(300, 0, [])
    # As often half as long as half as long again.
    assert fmean(varied) == pytest.approx(expected, rel=0.1)
    assert pstdev(varied) == pytest.approx(0.5 * expected, rel=0.15)


def test_variation_is_drawn_anew_by_the_seed_alone() -> None:
    machine = Machine(
        MACHINE.costs, 512, 128, 4000, 16, variation=ByKind(tuple(0.5 + 0.01 * i for i in range(100)), (1.0,))
    )
    assert ttfts(machine, seed=1) == ttfts(machine, seed=1) != ttfts(machine, seed=2)
