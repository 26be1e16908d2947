"""`outrider load`: an open-loop load on a service that runs, and what it made of it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from outrider.v1 import inference_pb2, inference_pb2_grpc
from rich.console import Console
from rich.live import Live

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
from services.cli.load.generator import Load, play
from services.cli.load.prompts import Prompts
from services.cli.load.ramp import ramped
from services.cli.load.view import plot, progress, report, summary_of
from services.cli.workload_options import (
    BurstinessOption,
    JsonOption,
    OutputTokensOption,
    PrefixesOption,
    PrefixShareOption,
    PrefixTokensOption,
    PromptTokensOption,
    SloTpotOption,
    SloTtftOption,
    VariationOption,
    ZipfOption,
    reject_missing_folders,
)
from services.simulator.report import Objectives, PlotUnavailable, drawing
from services.simulator.trace import read_trace
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload

_SHOWN_EVERY_SECONDS = 0.5
# To a pipe a line now and then.
_TOLD_EVERY_SECONDS = 10.0


class LoadError(Exception):
    """There is nothing to load, or it cannot take the load; the message is one line for the terminal."""


def load(
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the router listens.")] = DEFAULT_ADDRESS,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X",
            min=1e-9,
            help="Requests a second; given more than once, one load after another.",
            show_default="1",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="How many requests, at each rate.")] = 100,
    burstiness: BurstinessOption = 1.0,
    ramp: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="The rate grows from 0 for so long.", show_default="at once")
    ] = 0.0,
    prompt_tokens: PromptTokensOption = 200.0,
    prompt_variation: VariationOption = 0.5,
    output_tokens: OutputTokensOption = 64.0,
    output_variation: VariationOption = 0.5,
    prefixes: PrefixesOption = 0,
    prefix_tokens: PrefixTokensOption = 256,
    prefix_share: PrefixShareOption = 1.0,
    zipf: ZipfOption = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests from a JSONL or CSV file, in place of generated ones: time, prompt_tokens, output_tokens, "
            "and if there are any prefix_id, prefix_tokens, as for outrider simulate.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0: greedy.")] = 0.0,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Draft nothing.")] = False,
    slo_ttft: SloTtftOption = 1.0,
    slo_tpot: SloTpotOption = 0.05,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same arrivals and lengths.")] = 0,
    json_file: JsonOption = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw latencies and goodput there as PNG.")
    ] = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: NameOption = None,
) -> None:
    """Send requests as they would come, however the service keeps up; shows latencies, goodput and what failed.

    Prompts are token ids drawn at random, others each time, so that no run finds in the cache what the last one left.
    Outputs are as long as they were drawn, past any end of text. Exit status 1 if no request went well.
    """
    rates = rate or [1.0]
    shared = SharedPrefixes(prefixes, prefix_tokens, prefix_share, zipf) if prefixes else None
    lengths = Lengths(prompt_tokens, prompt_variation), Lengths(output_tokens, output_variation)
    console = Console(highlight=False)
    try:
        reject_missing_folders(json=json_file, plot=plot_file)
        if plot_file is not None:
            drawing()
        if trace is not None and rate:
            raise ValueError("--trace says when requests come: --rate is not for it")
        loads: dict[str, Sequence[Request]]
        if trace is not None:
            loads = {trace.name: read_trace(trace)}
            rates = [len(each) / max(each[-1].time, 1e-9) for each in loads.values()]
        else:
            workloads = {f"{each:g}/s": Workload(each, requests, *lengths, burstiness, shared) for each in rates}
            loads = {name: list(ramped(each.requests(seed), ramp)) for name, each in workloads.items()}
    except (ValueError, PlotUnavailable) as error:
        raise typer.BadParameter(str(error)) from None
    client = Client(address, client_credentials(ca, cert, key), server_name, api_key)
    fields: dict[str, Any] = {
        "temperature": temperature,
        "ignore_eos": True,
        "speculation": inference_pb2.Speculation(enabled=not no_speculation),
    }
    objectives = Objectives(slo_ttft, slo_tpot)
    try:
        played = asyncio.run(_run(client, loads, fields))
    except LoadError as error:
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from None
    console.print(report(played, objectives))
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(_as_json(played, objectives), indent=2) + "\n", encoding="utf-8")
        if plot_file is not None:
            plot(plot_file, played, rates, objectives)
    except OSError as error:
        typer.echo(f"outrider: {error.filename} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    if not any(answer.error is None for each in played.values() for answer in each.answers):
        raise typer.Exit(1)


async def _run(client: Client, loads: Mapping[str, Sequence[Request]], fields: dict[str, Any]) -> dict[str, Load]:
    """One load after another. Raises LoadError if they cannot be served, whatever is sent."""
    played = {}
    async with client.connect() as channel:
        if not await connects(channel):
            raise LoadError(await client.unconnected())
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=client.metadata)
        except grpc.aio.AioRpcError as error:
            raise LoadError(client.refusal(error)) from error
        prompts = Prompts(info.vocab_size, secrets.randbits(64))
        for name, requests in loads.items():
            longest = max(each.num_prompt_tokens + each.num_output_tokens for each in requests)
            if longest > info.max_context:
                raise LoadError(
                    f"load {name}: a request of {longest} tokens, prompt and output together, is beyond the "
                    f"{info.max_context} of {info.model}"
                )
            with _Progress(name) as shown:
                played[name] = await play(stub, requests, prompts, fields, client.metadata, shown.show)
    return played


class _Progress:
    """Shows a load on stderr while it is played."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._console.is_terminal:
            self._live.stop()

    def show(self, load: Load) -> None:
        self._task = asyncio.create_task(self._show(load))

    async def _show(self, load: Load) -> None:
        loop = asyncio.get_running_loop()
        while True:
            line = progress(load, loop.time() - load.began)
            if self._console.is_terminal:
                self._live.update(line, refresh=True)
                await asyncio.sleep(_SHOWN_EVERY_SECONDS)
            else:
                await asyncio.sleep(_TOLD_EVERY_SECONDS)
                self._console.print(f"{self._name}: {progress(load, loop.time() - load.began).plain.strip()}")


def _as_json(played: Mapping[str, Load], objectives: Objectives) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            **summary_of(load, objectives).as_json(),
            "sent": len(load.answers),
            "errors": dict(load.errors),
            "answers": [
                {
                    **answer.request._asdict(),
                    "ttft": answer.ttft,
                    "ended": answer.ended_at,
                    "tokens": len(answer.token_times),
                    "cached_tokens": answer.cached_tokens,
                    "error": answer.error,
                }
                for answer in load.answers
            ],
        }
        for name, load in played.items()
    ]
