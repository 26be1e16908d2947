"""Captured steps: filled up, staged and replayed they compute what steps do that are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.draft.draws import draw_ahead
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.sequence import Sequence
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.sampling.params import SamplingParams
from shared.sampling.rows import SampleRows
from tests.support.families import tiny_checkpoint
from tests.support.interpreted import interpreted
from tests.support.models import tiny_llama
from tests.support.trees import random_parents

from shared.engine.cuda.graphs import CapturedSteps, Replay, StaticBatch, size_of  # isort: skip

# What fills steps up is computed from whatever is in memory.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

NUM_BLOCKS = 60
BLOCK_SIZE = 8
MOST_TOKENS = 32


class Replaying:
    """In place of a GPU's graphs: runs again what was run. It must not ask for anything else than it did then."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.fails: Exception | None = None

    def record(self, run: Callable[[], None]) -> Replay:
        if self.fails is not None:
            raise self.fails
        self.num_recorded += 1
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


class Pair:
    """A model's steps, once as they are and once captured, each over a pool of its own."""

    def __init__(self, family: str, folder: Path, *, fused: bool = False) -> None:
        source = tiny_llama(folder) if family == "llama" else tiny_checkpoint(family, folder)
        self.model = CausalLM.load(str(source), "cpu", "float32", native="off")
        self.model._triton = interpreted()
        if fused:
            assert self.model.fuse()
        shape = self.model.kv_shape
        self.plain, self.captured = (
            ModelRunner(self.model, KVPool(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu")))
            for _ in range(2)
        )
        for runner in (self.plain, self.captured):
            runner.pool.data.fill_(torch.nan)
        self.recorder = Replaying()
        pool = self.captured.pool
        self.captured.run_captured(
            CapturedSteps(
                self.model.torch_forward, pool, self.model.attention, NUM_BLOCKS - 1, self.recorder, MOST_TOKENS
            )
        )

    def check(
        self,
        starts: list[int],
        lengths: list[int],
        tables: list[list[int]],
        rng: random.Random,
        parents: list[tuple[int, ...]] | None = None,
    ) -> Tensor:
        tokens = [rng.randrange(1, self.model.vocab_size) for _ in range(sum(lengths))]
        expected, got = (
            runner.run_packed(tokens, starts, lengths, tables, range(len(tokens)), parents)
            for runner in (self.plain, self.captured)
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        return got


def tables_for(num_sequences: int, rng: random.Random) -> list[list[int]]:
    """None has the last block."""
    blocks = rng.sample(range(NUM_BLOCKS - 1), NUM_BLOCKS - 1)
    each = (NUM_BLOCKS - 1) // num_sequences
    return [blocks[i * each : (i + 1) * each] for i in range(num_sequences)]


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("mistral", False), ("gpt_oss", False)])
def test_steps_are_what_they_are_uncaptured(family: str, fused: bool, tmp_path: Path) -> None:
    pair, rng = Pair(family, tmp_path, fused=fused), random.Random(1)
    tables = tables_for(4, rng)
    starts = [0, 0, 0, 0]
    # Prompts, then decodes and verifications of other sizes in each step; contexts grow all the while.
    pair.check(starts, [20, 3, 1, 7], tables, rng)
    starts = [20, 3, 1, 7]
    for _ in range(5):
        lengths = [rng.choice([1, 1, 2, 5]) for _ in starts]
        pair.check(starts, lengths, tables, rng)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert pair.recorder.num_replayed == 6
    assert pair.recorder.num_recorded <= pair.recorder.num_replayed


def test_ids_that_are_on_the_device_are_those_of_the_step(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(5)
    tables = tables_for(3, rng)
    pair.check([0, 0, 0], [9, 4, 2], tables, rng)
    ids = torch.tensor([3, 8, 11])
    expected = pair.plain.run_packed(ids.tolist(), [9, 4, 2], [1, 1, 1], tables, range(3))
    got = pair.captured.run_packed(ids, [9, 4, 2], [1, 1, 1], tables, range(3))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert pair.recorder.num_replayed == 2


def test_a_size_is_captured_once_whatever_is_in_it(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(2)
    for num_sequences, context in ((4, 1), (4, 60), (1, 30), (2, 100)):
        tables = tables_for(num_sequences, rng)
        length = 4 // num_sequences
        for runner in (pair.plain, pair.captured):
            runner.pool.data.zero_()  # as if it had been computed before
        pair.check([context] * num_sequences, [length] * num_sequences, tables, rng)
    assert (pair.recorder.num_recorded, pair.recorder.num_replayed) == (1, 4)


def test_what_capturing_takes_is_told_apart(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(10)
    tables = tables_for(1, rng)
    assert pair.plain.capture_seconds == pair.captured.capture_seconds == 0.0
    pair.check([0], [3], tables, rng)
    assert (first := pair.captured.capture_seconds) > 0.0
    pair.check([3], [3], tables, rng)
    assert pair.captured.capture_seconds == first
    pair.check([6], [4], tables, rng)
    assert pair.captured.capture_seconds > first


def test_trees_are_captured_too(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(3)
    tables = tables_for(3, rng)
    pair.check([0, 0, 0], [9, 4, 2], tables, rng)
    for _ in range(3):
        parents = [random_parents(rng, size) for size in (6, 0, 3)]
        pair.check([9, 4, 2], [7, 1, 4], tables, rng, parents)
    assert pair.recorder.num_recorded == 2


def test_what_fills_a_step_up_touches_nothing(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(4)
    tables = tables_for(1, rng)
    pair.check([0], [17], tables, rng)  # filled up to 18
    theirs, ours = pair.plain.pool.data, pair.captured.pool.data
    torch.testing.assert_close(ours[:-1], theirs[:-1], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not ours[-1, :, :, 0].isnan().any()  # that is where it went
    assert theirs[-1].isnan().all()


def test_other_steps_are_not_captured(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(5)
    tables = tables_for(1, rng)
    pair.check([0], [MOST_TOKENS + 1], tables, rng)
    assert pair.captured.run_packed([3], [0], [1], tables, [0, 0]).shape == (2, pair.model.vocab_size)
    assert pair.recorder.num_recorded == 0


@pytest.mark.parametrize("rows", [[], [10], [8, 11], [2, 8, 11], [11, 4]], ids=str)
def test_steps_whose_logits_are_not_all_wanted_have_those_that_are(rows: list[int], tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(9)
    tables = tables_for(3, rng)
    tokens = [rng.randrange(1, pair.model.vocab_size) for _ in range(12)]
    expected, got = (
        runner.run_packed(tokens, [0, 0, 0], [3, 6, 3], tables, rows) for runner in (pair.plain, pair.captured)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert pair.recorder.num_replayed == 1
    # And their KV is there for those to come.
    pair.check([3, 6, 3], [1, 1, 1], tables, rng)


def test_what_cannot_be_captured_runs_without_and_is_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(6)
    pair.recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    tables = tables_for(1, rng)
    for start in range(3):
        pair.check([start], [1], tables, rng)
    assert len([record for record in caplog.records if "run without graphs" in record.getMessage()]) == 1


def test_a_size_that_there_is_no_memory_for_runs_without_and_others_do_not(tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(7)
    tables = tables_for(1, rng)
    pair.recorder.fails = torch.OutOfMemoryError("CUDA out of memory")
    pair.check([0], [9], tables, rng)
    pair.recorder.fails = None
    pair.check([9], [1], tables, rng)
    pair.check([10], [9], tables, rng)
    assert (pair.recorder.num_recorded, pair.recorder.num_replayed) == (1, 1)


def test_what_a_graph_reads_lives_as_long_as_it_does(tmp_path: Path) -> None:
    """A graph knows addresses: what its forward is given has to be the steps' own memory."""
    model = CausalLM.load(str(tiny_llama(tmp_path)), "cpu", "float32", native="off")
    model._triton = interpreted()
    given: list[Tensor] = []

    def forward(ids: Tensor, positions: Tensor, batch: StaticBatch, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        step = batch.cuda
        given.extend([ids, positions, rows, step._places, step._tables, step._positions])
        for how in model.attention:
            windows = step._of_window(how.num_heads // model.kv_shape.num_kv_heads, how.sliding_window)
            given.extend([windows.first_parts, windows.ancestors])
            given.extend(each for launch in windows.launches for each in (launch.num_items, launch.items))
        return model.torch_forward(ids, positions, batch, rows)

    runner = ModelRunner(model, KVPool(model.kv_shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu")))
    steps = CapturedSteps(forward, runner.pool, model.attention, NUM_BLOCKS - 1, Replaying(), MOST_TOKENS)
    runner.run_captured(steps)
    runner.run_packed([5, 6, 7], [0], [3], [[4]], range(3))
    own = [each for each in vars(steps).values() if isinstance(each, Tensor)]
    assert len(given) > 6
    for tensor in given:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(each.data_ptr() <= first and last <= each.data_ptr() + each.nbytes for each in own)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_drafts_are_drawn_ahead_by_captured_steps(num_sequences: int, tmp_path: Path) -> None:
    pair, rng = Pair("llama", tmp_path), random.Random(8)
    tables = tables_for(num_sequences, rng)
    lengths = [5, 9, 2][:num_sequences]
    pair.check([0] * num_sequences, lengths, tables, rng)
    greedy = SamplingParams(temperature=0.0)
    drawn = []
    for runner in (pair.plain, pair.captured):
        sequences = [Sequence([3] * (length + 1), 1, greedy, b"", drafting=True) for length in lengths]
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.block_table = table
        plans = [
            StepPlan([ScheduledSequence(each, len(each.token_ids) - 1 + i, 1, 1, []) for each in sequences])
            for i in range(4)
        ]
        rows = [SampleRows(greedy, each.token_ids, 1) for each in sequences]
        draws = draw_ahead(rows, 4, pair.model.vocab_size, torch.device("cpu"))
        assert draws is not None
        drawn.append(runner.run_ahead(plans, draws))
    assert drawn[0] == drawn[1]
    assert pair.recorder.num_replayed == 5


def test_captured_states_are_those_of_the_step(tmp_path: Path) -> None:
    model = CausalLM.load(str(tiny_llama(tmp_path)), "cpu", "float32", native="off")
    model._triton = interpreted()
    model.capture([1, 2])
    seen = []
    for is_captured in (False, True):
        runner = ModelRunner(model, KVPool(model.kv_shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu")))
        if is_captured:
            steps = CapturedSteps(
                model.torch_forward, runner.pool, model.attention, NUM_BLOCKS - 1, Replaying(), MOST_TOKENS
            )
            runner.run_captured(steps)
        runner.run_packed([5, 6, 7], [0], [3], [[4]], range(3))
        assert model.captured is not None
        seen.append(model.captured.clone())
    torch.testing.assert_close(*seen)
    assert seen[0].shape == (3, 2, model.hidden_size)


def test_sizes_are_an_eighth_apart() -> None:
    assert [size_of(n) for n in (1, 2, 15, 16, 17, 18, 31, 33, 63, 65, 255)] == [
        1,
        2,
        15,
        16,
        18,
        18,
        32,
        36,
        64,
        72,
        256,
    ]
    for num_tokens in range(1, 257):
        size = size_of(num_tokens)
        assert num_tokens <= size <= num_tokens * 9 / 8
        assert size_of(size) == size
