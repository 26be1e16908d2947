"""`outrider generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import grpc
import grpc.aio
import typer
from outrider.v1 import inference_pb2, inference_pb2_grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.client import (
    DEFAULT_ADDRESS,
    ApiKeyOption,
    CaOption,
    CertOption,
    Client,
    KeyOption,
    NameOption,
    client_credentials,
    connects,
)
from services.cli.speculation_view import legend, render_tokens, summary


class GenerateError(Exception):
    """No answer, or not a whole one; the message is one line for the terminal."""


@dataclass(slots=True)
class Transcript:
    """What a stream brought: text, the tokens of the output with their logprobs, and usage."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    usage: inference_pb2.Usage | None = None


class DraftSource(StrEnum):
    """Who may draft: a draft worker's model, its copies of texts, or the target worker itself."""

    MODEL = "model"
    SUFFIX = "suffix"
    TARGET = "target"


_SOURCES = {
    DraftSource.MODEL: inference_pb2.DRAFT_SOURCE_MODEL,
    DraftSource.SUFFIX: inference_pb2.DRAFT_SOURCE_SUFFIX,
    DraftSource.TARGET: inference_pb2.DRAFT_SOURCE_TARGET,
}


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The router's host:port.")] = DEFAULT_ADDRESS,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most output tokens.", show_default="256")
    ] = None,
    min_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Fewest output tokens.")] = 0,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="N", min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="X", help="Keep the fewest tokens that hold this much probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="X", help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="X", help="Divides logits of tokens seen before.")] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Subtracted once from logits of output tokens.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Subtracted each time from logits of output tokens.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the output; may be given often.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The same seed gives the same tokens.", show_default="none"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's chat message.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Draft nothing.")] = False,
    num_draft_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Draft tokens a round, at most 16.", show_default="adaptive")
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="With --num-draft-tokens: draft trees of so many tokens, at most 64.",
            show_default="chains; adaptive without it",
        ),
    ] = None,
    sources: Annotated[
        list[DraftSource] | None,
        typer.Option(
            "--source",
            help="Who may draft: a draft worker's model, copies, the target itself; may be given often.",
            show_default="whoever there is",
        ),
    ] = None,
    show_speculation: Annotated[
        bool, typer.Option("--show-speculation", help="Colour accepted, rejected and recovered tokens.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Show each token's log-probability, and the likeliest.", show_default="off"
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: NameOption = None,
) -> None:
    """Generate text from a prompt; ends with a summary: TTFT, tokens/s, α, tokens per round, prefix hit."""
    try:
        prompt = sys.stdin.read() if prompt == "-" else prompt
        request = inference_pb2.GenerateRequest(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=stop or [],
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
            speculation=inference_pb2.Speculation(
                enabled=not no_speculation,
                num_draft_tokens=num_draft_tokens,
                num_nodes=num_nodes,
                sources=[_SOURCES[source] for source in sources or ()],
            ),
            include_draft_tokens=show_speculation or logprobs is not None,
        )
        if chat:
            request.chat.messages.add(role="user", content=prompt)
        else:
            request.text = prompt
    except ValueError as error:  # text that is not UTF-8, a number that its field cannot hold
        raise typer.BadParameter(str(error)) from None
    client = Client(address, client_credentials(ca, cert, key), server_name, api_key)
    show(client, request, Console(highlight=False, soft_wrap=True), show_speculation=show_speculation)


def show(
    client: Client, request: inference_pb2.GenerateRequest, console: Console, *, show_speculation: bool
) -> Transcript:
    """Streams `request`'s answer to `console`; a failure becomes one line on stderr and exit status 1."""
    try:
        return asyncio.run(stream(client, request, console, show_speculation=show_speculation))
    except GenerateError as error:
        console.file.flush()
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from None


async def stream(
    client: Client, request: inference_pb2.GenerateRequest, console: Console, *, show_speculation: bool
) -> Transcript:
    """Sends `request` and shows what comes as it comes. Raises GenerateError if there is no server, or it says no."""
    transcript = Transcript()
    colours = console.color_system is not None and not console.no_color
    if show_speculation:
        console.print(legend(colours=colours), end="\n\n")
    async with client.connect() as channel:
        if not await connects(channel):
            raise GenerateError(await client.unconnected())
        try:
            async for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=client.metadata):
                if show_speculation:
                    console.print(render_tokens(chunk.draft_tokens, colours=colours), end="")
                else:
                    console.print(Text(chunk.text), end="")
                _record(chunk, transcript)
        except grpc.aio.AioRpcError as error:
            raise GenerateError(client.refusal(error)) from error
    console.print()
    if request.HasField("logprobs"):
        console.print(_logprobs_table(transcript))
    if transcript.usage is not None:
        console.print(Text(f"\n{summary(transcript.usage)}", style="dim"))
    return transcript


def _record(chunk: inference_pb2.GenerateResponse, transcript: Transcript) -> None:
    transcript.text += chunk.text
    kept = (token for token in chunk.draft_tokens if token.origin != inference_pb2.TOKEN_ORIGIN_REJECTED)
    transcript.tokens += [token.text for token in kept]
    transcript.logprobs += chunk.logprobs
    if chunk.HasField("usage"):
        transcript.usage = chunk.usage


def _logprobs_table(transcript: Transcript) -> Table:
    """One row for each output token: its text, its log-probability, and the likeliest ids with theirs."""
    table = Table("token", "logprob", "likeliest (token id: logprob)", box=None)
    for token, entry in zip(transcript.tokens, transcript.logprobs, strict=False):
        likeliest = ", ".join(f"{top.token_id}: {top.logprob:.3f}" for top in entry.top)
        table.add_row(Text(repr(token)), f"{entry.logprob:.3f}", likeliest)
    return table
