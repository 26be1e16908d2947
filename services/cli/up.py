"""`outrider up`: the local stack in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.log_view import render_log
from services.cli.stack import Stack, StackSettings
from services.draft.settings import NO_MODEL
from shared.models import DEMO_DRAFT, DEMO_TARGET


def up(
    target: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Target model: a local folder or a hub name.", show_default="the demo target"
        ),
    ] = str(DEMO_TARGET),
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help='Draft model, "copy" to draft without one from prompts and outputs, or "none" for no draft worker.',
            show_default="the demo draft",
        ),
    ] = str(DEMO_DRAFT),
    head: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Heads that the target workers draft with themselves: a local folder or a hub name."
        ),
    ] = None,
    early_exit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Have the target workers draft with their first so many layers."),
    ] = None,
    num_targets: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Target workers that prefill and decode.", show_default="1, or 0 beside pools"
        ),
    ] = None,
    prefill: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Target workers that prefill; with --decode."),
    ] = 0,
    decode: Annotated[int, typer.Option(metavar="N", min=0, help="Target workers that decode.")] = 0,
    num_drafts: Annotated[
        int, typer.Option(metavar="N", min=0, help="Draft workers; 0: the draft model runs inside the target workers.")
    ] = 1,
    prefix_store: Annotated[
        bool, typer.Option("--prefix-store", help="Keep prefix blocks themselves in Redis, too.")
    ] = False,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address that the router listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="The router's port; 0 picks a free one.")
    ] = 50051,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N, for all workers.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16, for all workers.")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads of each worker.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="TOML file with a table for each service.")] = None,
    certs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="TLS, by what `outrider certs` made.", show_default="plain text"),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time that running requests get on Ctrl-C.")
    ] = 30.0,
) -> None:
    """Run the whole stack on this machine: Redis, a draft worker, target workers and a router.

    Ctrl-C drains it, a second one ends it at once. What else there is to set comes from the environment
    (OUTRIDER_ROUTER_..., OUTRIDER_TARGET_..., OUTRIDER_DRAFT_...) or from --config.
    """
    if num_drafts == 0 and draft == "copy":
        raise typer.BadParameter("--draft copy is a draft worker's: target workers copy by themselves")
    if num_drafts == 0 and draft != "none" and (head is not None or early_exit is not None):
        raise typer.BadParameter(
            "with --num-drafts 0 the draft model drafts inside the target workers, and nothing else"
        )
    if not decode and (num_targets == 0 or (prefill and not num_targets)):
        raise typer.BadParameter("there must be workers that decode: --decode, or --num-targets")
    settings = StackSettings(
        target=target,
        draft={"none": None, "copy": NO_MODEL}.get(draft, draft),
        head=head,
        early_exit=early_exit,
        num_targets=num_targets,
        num_prefill=prefill,
        num_decode=decode,
        num_drafts=num_drafts,
        prefix_store=prefix_store,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        config=config,
        certs=certs,
        drain_seconds=drain_seconds,
    )
    asyncio.run(_run(settings))


async def _run(settings: StackSettings) -> None:
    """Runs the stack until SIGINT, SIGTERM or a service that fails for good (StartupError)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    this_task = asyncio.current_task()
    assert this_task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with Stack(settings, lambda name, line: console.print(render_log(name, line))) as stack:
            console.print(f"[bold]Ready[/] at {stack.router_address}; Ctrl-C stops.")
            await stack.wait()
