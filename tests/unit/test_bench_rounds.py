"""How a round's time is told apart: from spans with known times."""

from __future__ import annotations

import pytest

from shared.policy.step_costs import StepCosts
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.rounds import parts_inside, parts_of, requests_of
from tests.support.otlp import ReceivedSpan

MS = 1_000_000


def span(name: str, span_id: str, parent: str, begin: float, end: float, gamma: int = 4) -> ReceivedSpan:
    """Times in ms."""
    attributes: dict[str, object] = {"outrider.num_draft_tokens": gamma}
    times = int(begin * MS), int(end * MS)
    return ReceivedSpan("any", name, "trace", span_id, parent, 1, *times, attributes, (), 0, "")


def a_round(
    number: int, begin: float, slower: float = 0.0, request: str = "request", gamma: int = 4, verifying: float = 3.5
) -> list[ReceivedSpan]:
    """10 ms and another until the next: 1 to the drafter, 3 there, 2 on the way, 3.5 of verifying, 0.5 back."""
    name = f"{request}-{number}"
    return [
        span("draft", f"d-{name}", name, begin + 1, begin + 4 + slower, gamma),
        span("verify", f"v-{name}", name, begin + 6 + slower, begin + 6 + slower + verifying),
        span("round", name, request, begin, begin + 10 + slower, gamma),
    ]


def test_a_rounds_stretches_are_told_apart() -> None:
    spans = [each for i in range(3) for each in a_round(i, 11.0 * i, slower=0.5 if i == 1 else 0.0)]
    # Others' rounds, and those of another γ, are no part of it.
    spans += a_round(0, 500.0, request="alone") + a_round(9, 400.0, gamma=2)
    (request,) = requests_of(reversed(spans), 4)
    assert {name: pytest.approx([each * 1e3 for each in values]) for name, values in request.items()} == {
        "router to draft worker": [1, 1, 1],
        "drafting": [3, 3.5, 3],
        "draft worker to router to target worker": [2, 2, 2],
        "verifying": [3.5, 3.5, 3.5],
        "target worker to router": [0.5, 0.5, 0.5],
        "router, to the next round": [1, 0.5, 368],
    }


def test_a_round_without_its_drafts_does_not_count() -> None:
    whole = a_round(0, 0.0) + a_round(1, 11.0)
    assert len(requests_of(whole, 4)) == 1
    assert requests_of([each for each in whole if each.name != "draft"], 4) == []
    assert requests_of(a_round(0, 0.0), 4) == []


def turn(begin: float, request: str, slower: float, gamma: int) -> list[ReceivedSpan]:
    verifying = 3.2 if gamma == 1 else 3.5
    return [each for i in range(3) for each in a_round(i, begin + 20 * i, slower, request, gamma, verifying)]


def test_steps_are_held_against_the_rounds_of_their_turn() -> None:
    # Each turn is slower than the one before, in all that it does.
    spans = [*turn(0, "a", 3, 4), *turn(100, "b", 0, 1), *turn(200, "c", 9, 4), *turn(300, "d", 3, 1)]
    spans += [*turn(400, "e", 6, 4), *turn(500, "f", 1, 1)]
    parts = parts_of(requests_of(spans, 4), requests_of(spans, 1), [0.003, 0.001, 0.0025], 4)
    drafting, verifying = (next(part for part in parts if part.name == name) for name in ("drafting", "verifying"))
    # 6, 12 and 9 ms, of which 4, 8 and 20/3 are steps.
    assert (drafting.seconds * 1e3, (drafting.seconds - drafting.steps) * 1e3) == pytest.approx((9, 7 / 3))
    assert (verifying.seconds * 1e3, (verifying.seconds - verifying.steps) * 1e3) == pytest.approx((3.5, 0.7))
    assert [part.steps for part in parts if part not in (drafting, verifying)] == [0] * 4


def test_every_turn_must_be_whole() -> None:
    spans = [*turn(0, "a", 3, 4), *turn(100, "b", 0, 1), *turn(200, "c", 9, 4)]
    with pytest.raises(BenchmarkError, match="2 turns, but 2 of 4 and 1 of 1 draft token"):
        parts_of(requests_of(spans, 4), requests_of(spans, 1), [0.003, 0.001], 4)


def test_rounds_inside_a_target_are_told_apart_by_those_of_one_draft_token() -> None:
    # 20 ms and one for each row more, 3 for each draft token, and 2 around all.
    costs = StepCosts([(1, 0.010), (2, 0.011), (5, 0.014)])
    parts = parts_inside({0: 0.020, 1: 0.021 + 0.003 + 0.002, 4: 0.024 + 0.012 + 0.002}, 4, costs)
    assert {part.name: round(part.seconds * 1e3, 6) for part in parts} == {
        "drafting": 12.0,
        "verifying": 24.0,
        "around them": 2.0,
    }
    assert sum(part.steps for part in parts) == pytest.approx(0.036)
