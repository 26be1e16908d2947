"""Sessions on prefill and decode pools, of fake workers: whoever fails when, the tokens are the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.v1 import inference_pb2, worker_pb2

from tests.support.fake_target import Fault
from tests.support.fake_workers import plain_output
from tests.support.router_stack import GREEDY, Stack, greedy, read_all, stack, until

pytestmark = pytest.mark.timeout(60)

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE
# Long enough that a decode worker, slow at prompts, had better not compute it.
LONG = [5, 17, 40, 8] * 40
MAX_TOKENS = 24
LONG_GREEDY = plain_output(LONG, MAX_TOKENS)


@asynccontextmanager
async def pools(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> AsyncIterator[Stack]:
    """Decode workers take thirty times as long as prefill workers for 128 tokens."""
    async with stack(roles=[PREFILL] * num_prefill + [DECODE] * num_decode, **settings) as s:
        for target, link in zip(s.targets, s.fleet.targets, strict=True):
            if target.info.role == DECODE:
                assert link.info is not None
                del target.info.step_costs[:]
                target.info.step_costs.add(num_tokens=1, seconds=0.01)
                target.info.step_costs.add(num_tokens=128, seconds=0.3)
                epoch = link.epoch
                link.hang_up()
                await until(lambda link=link, epoch=epoch: link.connected and link.epoch > epoch, "slow")  # type: ignore[misc]
        await until(lambda: all(target.streams for target in s.targets), "streams open")
        yield s


def long(num_draft_tokens: int | None = 0, **fields: Any) -> inference_pb2.GenerateRequest:
    request = greedy(num_draft_tokens, MAX_TOKENS, **fields)
    request.token_ids.ids[:] = LONG
    return request


@pytest.mark.parametrize("num_draft_tokens", [0, 3, None])
async def test_a_long_prompt_is_prefilled_here_and_decoded_there(num_draft_tokens: int | None) -> None:
    async with pools() as s:
        prefill, decode = s.targets
        assert (await s.generate(long(num_draft_tokens))).tokens == {0: LONG_GREEDY}
        await s.until_idle()
        assert [len(each.token_ids) for each in prefill.prefills] == [len(LONG)]
        assert [len(each.token_ids) for each in decode.prefills] == [len(LONG) + 1]
        [pull] = decode.pulls
        assert list(pull.token_ids) == LONG
        assert pull.ticket == prefill.exports[0]
        assert pull.address == prefill.address
        assert prefill.withdrawn == prefill.exports


async def test_a_short_prompt_stays_where_it_is_decoded() -> None:
    async with pools() as s:
        assert (await s.generate(greedy(0))).tokens == {0: GREEDY}
        assert not s.targets[0].prefills
        await s.until_idle()


async def test_sequences_of_one_prompt_share_one_transfer() -> None:
    async with pools() as s:
        output = await s.generate(long(n=3, temperature=0.7, seed=5))
        expected = {i: plain_output(LONG, MAX_TOKENS, 1 + 5 + i) for i in range(3)}
        assert output.tokens == expected
        await s.until_idle()
        prefill, decode = s.targets
        assert (len(prefill.prefills), len(decode.pulls), len(decode.prefills)) == (1, 1, 3)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_an_output_that_ends_at_or_behind_its_first_token(max_tokens: int) -> None:
    async with pools() as s:
        request = long()
        request.max_tokens = max_tokens
        assert (await s.generate(request)).tokens == {0: LONG_GREEDY[:max_tokens]}
        assert len(s.targets[1].prefills) == max_tokens - 1
        await s.until_idle()


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("who", [0, 1])
async def test_a_fault_on_either_side_costs_no_token(fault: Fault, who: int) -> None:
    async with pools(num_decode=2) as s:
        for step in range(8 if who else 1):
            s.targets[who].faults = {s.targets[who].num_steps + step: fault}
            assert (await s.generate(long())).tokens == {0: LONG_GREEDY}
            s.targets[who].faults = {}
            await s.until_idle()
            await until(lambda: all(link.connected for link in s.fleet.targets), "all are back")


async def test_the_prefill_worker_dies_before_the_first_token() -> None:
    async with pools() as s:
        prefill, decode = s.targets
        prefill.gate.clear()
        running = asyncio.create_task(s.generate(long()))
        await until(lambda: bool(decode.pulls), "on its way")
        await prefill.stop()
        # There is no other: the one that decodes computes it.
        assert (await running).tokens == {0: LONG_GREEDY}
        prefill.gate.set()
        await s.until_idle()


async def test_the_decode_worker_dies_before_the_sequence_arrives() -> None:
    async with pools(num_decode=2) as s:
        prefill = s.targets[0]
        prefill.gate.clear()
        running = asyncio.create_task(s.generate(long()))
        await until(lambda: any(target.pulls for target in s.targets[1:]), "on its way")
        chosen = next(target for target in s.targets if target.pulls)
        await chosen.stop()
        link = next(link for link, target in zip(s.fleet.targets, s.targets, strict=True) if target is chosen)
        await until(lambda: not link.connected, "noticed")
        prefill.gate.set()
        assert (await running).tokens == {0: LONG_GREEDY}
        await chosen.start()
        await until(lambda: link.connected, "back")
        await s.until_idle()


async def test_a_client_that_leaves_while_its_kv_is_on_its_way() -> None:
    async with pools() as s:
        prefill, decode = s.targets
        prefill.gate.clear()
        call = s.stub.Generate(long(n=2))
        reading = asyncio.create_task(read_all(call))
        await until(lambda: bool(decode.pulls), "on its way")
        call.cancel()
        assert await reading is grpc.StatusCode.CANCELLED
        prefill.gate.set()
        await s.until_idle()
        assert prefill.withdrawn == prefill.exports
        assert not decode.prefills


async def test_without_a_decode_worker_nothing_is_served_and_without_a_prefill_worker_everything() -> None:
    async with pools() as s:
        prefill, decode = s.targets
        await prefill.stop()
        await until(lambda: not s.fleet.targets[0].connected, "gone")
        assert s.fleet.usable
        assert (await s.generate(long())).tokens == {0: LONG_GREEDY}
        await prefill.start()
        await until(lambda: s.fleet.targets[0].connected, "back")
        await decode.stop()
        await until(lambda: not s.fleet.targets[1].connected, "gone")
        assert not s.fleet.usable
        assert await read_all(s.stub.Generate(long())) is grpc.StatusCode.UNAVAILABLE
        await decode.start()
        await until(lambda: s.fleet.usable, "back")
        await s.until_idle()


async def test_a_draining_worker_hands_its_sequences_over() -> None:
    async with pools(num_prefill=0, num_decode=2) as s:
        calls = [asyncio.create_task(s.generate(greedy(gamma, 400))) for gamma in (0, 0, 3, None)]
        await until(lambda: sum(target.num_sequences for target in s.targets) == 4, "all begun")
        going = next(target for target in s.targets if target.num_sequences)
        staying = next(target for target in s.targets if target is not going)
        await going.announce_drain()
        await until(lambda: going.num_sequences == 0, "all left")
        await until(lambda: len(going.exports) == len(staying.pulls) >= 1, "all are on their way")
        expected = plain_output([5, 17, 40, 8], 400)
        assert [(await call).tokens for call in calls] == [{0: expected}] * 4
        await s.until_idle()


async def test_with_nowhere_to_go_a_draining_worker_finishes() -> None:
    async with pools(num_prefill=0, num_decode=1) as s:
        running = asyncio.create_task(s.generate(greedy(0, 100)))
        await until(lambda: s.target.num_sequences == 1, "begun")
        await s.target.announce_drain()
        assert (await running).tokens == {0: plain_output([5, 17, 40, 8], 100)}
        await s.until_idle()


async def test_a_few_at_a_time_leave_a_worker_that_drains() -> None:
    async with pools(num_prefill=0, num_decode=2) as s:
        going, staying = s.fleet.targets
        calls = [asyncio.create_task(s.generate(greedy(0, 400))) for _ in range(20)]
        await until(lambda: sum(target.num_sequences for target in s.targets) == 20, "all begun")
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, going.num_leaving, staying.num_leaving)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await s.targets[0].announce_drain()
        expected = plain_output([5, 17, 40, 8], 400)
        assert [(await call).tokens for call in calls] == [{0: expected}] * 20
        watching.cancel()
        assert 0 < most <= 4
        await s.until_idle()
        assert going.num_leaving == staying.num_leaving == 0


async def test_a_worker_that_ends_in_order_has_not_failed() -> None:
    async with pools(num_prefill=0, num_decode=1) as s:
        [link] = s.fleet.targets
        failures: list[None] = []
        link.breaker.failed = lambda: failures.append(None)  # type: ignore[method-assign]
        for in_order in (True, False):
            running = asyncio.create_task(s.generate(greedy(0, 400)))
            await until(lambda: s.target.num_sequences == 1, "begun")
            if in_order:
                await s.target.announce_drain()
                await until(lambda: link.draining, "told")
            await s.target.stop()
            await until(lambda: not link.connected, "gone")
            await s.target.start()
            assert (await running).tokens == {0: plain_output([5, 17, 40, 8], 400)}
            assert len(failures) == (not in_order)
        await s.until_idle()
