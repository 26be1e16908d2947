"""How `outrider generate` shows a stream: colours, marks, summary, logs."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Iterable

import grpc.aio
import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc
from rich.console import Console

from services.cli.client import Client
from services.cli.generate import GenerateError, stream
from services.cli.log_view import render_log
from services.cli.speculation_view import SOURCE_STYLES, STYLES, acceptance_rate, legend, render_tokens, summary

TARGET = inference_pb2.TOKEN_ORIGIN_TARGET
ACCEPTED = inference_pb2.TOKEN_ORIGIN_ACCEPTED
REJECTED = inference_pb2.TOKEN_ORIGIN_REJECTED
RECOVERED = inference_pb2.TOKEN_ORIGIN_RECOVERED
BONUS = inference_pb2.TOKEN_ORIGIN_BONUS


def tokens(*pairs: tuple[str, inference_pb2.TokenOrigin]) -> list[inference_pb2.DraftToken]:
    return [inference_pb2.DraftToken(text=text, origin=origin) for text, origin in pairs]


def usage(positions: Iterable[tuple[int, int]], **fields: float) -> inference_pb2.Usage:
    acceptance = [inference_pb2.PositionAcceptance(drafted=d, accepted=a) for d, a in positions]
    message = inference_pb2.Usage(acceptance_by_position=acceptance)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def test_each_origin_has_its_colour() -> None:
    text = render_tokens(
        tokens(("a", TARGET), ("b", ACCEPTED), ("c", REJECTED), ("d", RECOVERED), ("e", BONUS)), colours=True
    )
    assert text.plain == "abcde"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans if span.style}
    assert styles == {"a": "dim", "b": "green", "c": "red strike", "d": "blue", "e": "cyan"}


def test_accepted_tokens_have_the_colour_of_who_drafted_them() -> None:
    sources = {
        "a": inference_pb2.DRAFT_SOURCE_MODEL,
        "b": inference_pb2.DRAFT_SOURCE_SUFFIX,
        "c": inference_pb2.DRAFT_SOURCE_TARGET,
    }
    shown = [inference_pb2.DraftToken(text=text, origin=ACCEPTED, source=source) for text, source in sources.items()]
    shown.append(inference_pb2.DraftToken(text="d", origin=REJECTED, source=inference_pb2.DRAFT_SOURCE_SUFFIX))
    text = render_tokens(shown, colours=True)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans if span.style}
    assert styles == {"a": "green", "b": "yellow", "c": "magenta", "d": "red strike"}
    assert render_tokens(shown, colours=False).plain == "abc[-d-]"


def test_without_colours_marks_tell_the_output_from_the_rejected() -> None:
    round_tokens = tokens(("def", ACCEPTED), (" main", REJECTED), ("(", REJECTED), (" f", RECOVERED), ("(", BONUS))
    assert render_tokens(round_tokens, colours=False).plain == "def[- main(-]{+ f+}{*(*}"


def test_a_rejected_line_break_does_not_break_the_line() -> None:
    text = render_tokens(tokens(("\n", ACCEPTED), ("\n", REJECTED), ("\n", RECOVERED)), colours=True)
    assert text.plain == "\n↵\n"


def test_the_legend_explains_every_mark() -> None:
    plain = legend(colours=False).plain
    assert plain == (
        "drafted and accepted, or not drafted · [-drafted and rejected-] · {+recovered by the target+} · "
        "{*bonus of the target*}"
    )
    coloured = legend(colours=True)
    styles = {str(span.style) for span in coloured.spans if span.style}
    assert styles == {*STYLES.values(), *(style for style, _ in SOURCE_STYLES.values())}
    assert coloured.plain.endswith(" · bonus of the target · not drafted")


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_alpha_is_the_acceptance_per_position(alpha: float, num_draft_tokens: int) -> None:
    # With acceptance alpha at each position, alpha^(i+1) of the rounds keep the token at position i.
    rounds = 4**num_draft_tokens
    positions = [(rounds, round(rounds * alpha ** (i + 1))) for i in range(num_draft_tokens)]
    rate = acceptance_rate(usage(positions))
    assert rate == pytest.approx(alpha, rel=1e-9)


def test_alpha_of_drafts_of_different_lengths() -> None:
    # Ten drafts of one token, all kept; four of two, whose second was kept once.
    assert acceptance_rate(usage([(14, 14), (4, 1)])) == pytest.approx(15 / 18)
    assert acceptance_rate(usage([(3, 0), (3, 0)])) == 0.0
    assert acceptance_rate(usage([])) is None
    assert acceptance_rate(usage([(0, 0)])) is None


def test_summary_line() -> None:
    line = summary(
        usage(
            [(10, 6), (10, 3)],
            prompt_tokens=40,
            cached_tokens=32,
            output_tokens=20,
            draft_tokens=20,
            accepted_tokens=9,
            rounds=10,
            time_to_first_token_seconds=0.0321,
            total_seconds=0.5,
        )
    )
    assert line == (
        "TTFT 32 ms · 40.0 tokens/s (20 in 0.50 s) · α 0.56 (9 of 20 draft tokens kept) · "
        "1.90 tokens per round · prefix hit 32/40"
    )


def test_the_summary_says_whose_tokens_were_kept() -> None:
    told = usage([(4, 3)], output_tokens=8, draft_tokens=4, accepted_tokens=3, rounds=4, total_seconds=1.0)
    for source, kept in ((inference_pb2.DRAFT_SOURCE_TARGET, 2), (inference_pb2.DRAFT_SOURCE_MODEL, 1)):
        told.by_source.add(source=source, accepted_tokens=kept)
    assert " · kept 1 by model, 2 by target · " in summary(told)
    del told.by_source[0]
    assert " · kept 1 by model · " in summary(told)


def test_summary_without_speculation() -> None:
    line = summary(usage([], prompt_tokens=3, output_tokens=0, total_seconds=0.0))
    assert line == "TTFT 0 ms · - tokens/s (0 in 0.00 s) · nothing drafted · prefix hit 0/3"


class Fabricated(inference_pb2_grpc.InferenceServicer):
    """Answers with the given chunks, then fails if told to; keeps the request and its metadata."""

    def __init__(self, chunks: list[inference_pb2.GenerateResponse], failure: str | None = None) -> None:
        self.chunks = chunks
        self.failure = failure
        self.request: inference_pb2.GenerateRequest | None = None
        self.metadata: dict[str, str | bytes] = {}

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.request = request
        self.metadata = dict(context.invocation_metadata() or ())
        for chunk in self.chunks:
            yield chunk
        if self.failure is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.failure)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> inference_pb2.TokenizeResponse:
        raise NotImplementedError

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> inference_pb2.GetModelInfoResponse:
        raise NotImplementedError


async def shown(
    servicer: Fabricated,
    request: inference_pb2.GenerateRequest,
    *,
    show_speculation: bool = False,
    api_key: str | None = None,
) -> str:
    """What `stream` writes to a console without colours."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    console = Console(file=io.StringIO(), soft_wrap=True, width=200)
    try:
        await stream(Client(f"127.0.0.1:{port}", api_key=api_key), request, console, show_speculation=show_speculation)
    finally:
        await server.stop(None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_text_is_shown_as_it_is_and_ends_with_the_summary() -> None:
    last = inference_pb2.GenerateResponse(text=" [bold]world[/]", usage=usage([], output_tokens=2))
    servicer = Fabricated([inference_pb2.GenerateResponse(text="hello"), last])
    output = await shown(servicer, inference_pb2.GenerateRequest(text="x"), api_key="key")
    assert output.startswith("hello [bold]world[/]\n\nTTFT ")
    assert servicer.metadata["authorization"] == "Bearer key"


async def test_speculation_is_shown_from_the_draft_tokens() -> None:
    round_tokens = tokens(("hel", ACCEPTED), ("p", REJECTED), ("lo", RECOVERED))
    chunk = inference_pb2.GenerateResponse(text="hello", draft_tokens=round_tokens, usage=usage([(2, 1)]))
    output = await shown(Fabricated([chunk]), inference_pb2.GenerateRequest(text="x"), show_speculation=True)
    assert output.splitlines()[2] == "hel[-p-]{+lo+}"


async def test_logprobs_stand_beside_their_tokens() -> None:
    entry = inference_pb2.TokenLogprobs(logprob=-0.5, top=[inference_pb2.TopLogprob(token_id=7, logprob=-0.25)])
    chunk = inference_pb2.GenerateResponse(
        text="ab", draft_tokens=tokens(("no", REJECTED), ("ab", RECOVERED)), logprobs=[entry]
    )
    output = await shown(Fabricated([chunk]), inference_pb2.GenerateRequest(text="x", logprobs=1))
    assert re.search(r"'ab' +-0\.500 +7: -0\.250", output)
    assert "'no'" not in output


async def test_an_error_of_the_server_is_its_status_and_message() -> None:
    servicer = Fabricated([inference_pb2.GenerateResponse(text="a")], failure="top_p is 2: must be in (0, 1]")
    with pytest.raises(GenerateError, match=re.escape("INVALID_ARGUMENT: top_p is 2: must be in (0, 1]")):
        await shown(servicer, inference_pb2.GenerateRequest(text="x"))


def test_a_json_log_line_is_rendered_for_people() -> None:
    line = (
        '{"time": "2026-01-02T03:04:05.678+00:00", "level": "WARNING", "service": "target", "logger": "x", '
        '"message": "[red] alert", "blocks": 3}'
    )
    assert re.fullmatch(r"\d\d:04:05 target-0  \[red\] alert blocks=3", render_log("target-0", line).plain)


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "{not json", "[1, 2]", '"text"', "{}"])
def test_any_other_line_is_shown_as_it_is(line: str) -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d draft     " + re.escape(line), render_log("draft", line).plain.rstrip())
