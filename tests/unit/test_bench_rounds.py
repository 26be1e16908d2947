"""How a round's time is told apart: from spans with known times."""

from __future__ import annotations

import pytest

from shared.policy.step_costs import StepCosts
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.rounds import Part, drafting_seconds, parts_inside, parts_of
from tests.support.otlp import ReceivedSpan

MS = 1_000_000


def span(name: str, span_id: str, parent: str, begin: float, end: float, gamma: int = 4) -> ReceivedSpan:
    """Times in ms."""
    attributes: dict[str, object] = {"outrider.num_draft_tokens": gamma}
    times = int(begin * MS), int(end * MS)
    return ReceivedSpan("any", name, "trace", span_id, parent, 1, *times, attributes, (), 0, "")


def a_round(
    number: int, begin: float, slower: float = 0.0, request: str = "request", gamma: int = 4
) -> list[ReceivedSpan]:
    """10 ms and another until the next: 1 to the drafter, 3 there, 2 on the way, 3.5 of verifying, 0.5 back."""
    name = f"{request}-{number}"
    return [
        span("draft", f"d-{name}", name, begin + 1, begin + 4 + slower, gamma),
        span("verify", f"v-{name}", name, begin + 6 + slower, begin + 9.5 + slower),
        span("round", name, request, begin, begin + 10 + slower, gamma),
    ]


def test_a_rounds_parts_are_medians_and_add_up() -> None:
    spans = [each for i in range(5) for each in a_round(i, 11.0 * i, slower=0.5 if i == 3 else 0.0)]
    # Others' rounds, and those of another γ, are no part of it.
    spans += a_round(0, 500.0, request="alone") + a_round(9, 400.0, gamma=2)
    parts = parts_of(reversed(spans), 4, draft_step=0.0005, verify_step=0.003)
    assert [part.name for part in parts] == [
        "router to draft worker",
        "drafting",
        "draft worker to router to target worker",
        "verifying",
        "target worker to router",
        "router, to the next round",
    ]
    assert [part.seconds * 1e3 for part in parts] == pytest.approx([1, 3, 2, 3.5, 0.5, 1])
    assert [part.steps * 1e3 for part in parts] == pytest.approx([0, 2, 0, 3, 0, 0])


def test_a_round_without_its_drafts_does_not_count() -> None:
    whole = a_round(0, 0.0) + a_round(1, 11.0)
    with pytest.raises(BenchmarkError, match="no round of 4"):
        parts_of([each for each in whole if each.name != "draft"], 4, 0.0005, 0.003)
    with pytest.raises(BenchmarkError, match="no round of 4"):
        parts_of(a_round(0, 0.0), 4, 0.0005, 0.003)
    assert Part("drafting", 0.003, 0.002) in parts_of(whole, 4, 0.0005, 0.003)


def test_what_drafting_takes_is_told_apart_by_the_number_of_tokens() -> None:
    spans = [*a_round(0, 0.0, 0.2), *a_round(1, 11.0, 0.4), *a_round(2, 22.0, 9.0), *a_round(3, 50.0, 5.0, gamma=1)]
    assert drafting_seconds(spans, 4) == pytest.approx(0.0034)
    assert drafting_seconds(spans, 1) == pytest.approx(0.008)
    with pytest.raises(BenchmarkError, match="no proposal of 2"):
        drafting_seconds(spans, 2)


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
