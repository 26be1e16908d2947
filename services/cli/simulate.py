"""`outrider simulate`: what a pool of workers would do with a load, or how many workers the load takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.simulate_models import defaults_for_models, place_models, reject_options_for_one_model
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
from services.simulator.cluster import Cluster, Pools
from services.simulator.costs import linear_costs, read_step_costs
from services.simulator.machine import Machine
from services.simulator.model import Fleet, Link
from services.simulator.model_file import read_models
from services.simulator.model_report import placement_table
from services.simulator.outcomes import Outcomes
from services.simulator.pool_sizes import least_of_both, least_separate
from services.simulator.report import Objectives, PlotUnavailable, Summary, drawing, plot, summarise, table
from services.simulator.routing import RoutingName
from services.simulator.step_fit import as_logged
from services.simulator.step_log import read_step_log
from services.simulator.trace import read_trace
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.placement import TransferRates


def simulate(
    context: typer.Context,
    prefill: Annotated[int, typer.Option(metavar="N", min=0, help="Workers that only prefill.")] = 0,
    decode: Annotated[int, typer.Option(metavar="N", min=0, help="Workers that decode.")] = 0,
    both: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Workers that do both.", show_default="1 if no others")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Find the fewest workers that meet the SLOs.")] = False,
    attainment: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Share of requests to meet both SLOs, for --plan.")
    ] = 0.95,
    most_workers: Annotated[int, typer.Option(metavar="N", min=1, help="Most workers, for --plan.")] = 64,
    slo_ttft: SloTtftOption = 1.0,
    slo_tpot: SloTpotOption = 0.05,
    routing: Annotated[
        list[RoutingName] | None,
        typer.Option(
            metavar="NAME",
            help="How requests are placed: policy, round-robin or affinity; given more than once, each is tried.",
            show_default="policy",
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Several models on the workers that --both counts, which take turns. TOML, a table for each: "
            "weights_gib, and if not as given here, with the options' names, KV bytes, steps, load and SLOs.",
        ),
    ] = None,
    worker_gib: Annotated[
        float, typer.Option(metavar="GIB", min=1e-9, help="Memory of a worker for weights and KV, for --models.")
    ] = 80.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same result.")] = 0,
    rate: Annotated[float, typer.Option(metavar="X", min=1e-9, max=1e9, help="Requests a second.")] = 4.0,
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many requests, of all models together.")
    ] = 2000,
    burstiness: BurstinessOption = 1.0,
    prompt_tokens: PromptTokensOption = 500.0,
    prompt_variation: VariationOption = 1.0,
    output_tokens: OutputTokensOption = 200.0,
    output_variation: VariationOption = 1.0,
    prefixes: PrefixesOption = 0,
    prefix_tokens: PrefixTokensOption = 512,
    prefix_share: PrefixShareOption = 1.0,
    zipf: ZipfOption = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests from a JSONL or CSV file, in place of generated ones: time, prompt_tokens, output_tokens, "
            "and if there are any prefix_id, prefix_tokens, model; with --models the model of each line.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a trace with several models, the one to take.")
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1e-9, max=1e6, help="A step takes this, whatever is in it,")
    ] = 0.02,
    tokens_per_second: Annotated[
        float, typer.Option(metavar="X", min=1e-9, help="and its tokens at this rate more.")
    ] = 20_000.0,
    step_costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured steps in place of these, as JSON: \\[\\[tokens, seconds], ...]."),
    ] = None,
    step_log: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Steps that a target worker wrote down by its --step-log: what they cost, by their tokens and "
            "contexts, and how much that varies; given more than once, of several workers.",
        ),
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens in a step.")] = 512,
    max_sequences: Annotated[int, typer.Option(metavar="N", min=1, help="Most sequences in a step.")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that a worker's KV has room for.")
    ] = 262_144,
    block_size: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in a KV block.")] = 16,
    kv_bytes_per_token: Annotated[float, typer.Option(metavar="N", min=1, help="KV of a token.")] = 131_072.0,
    link_rate: Annotated[
        float, typer.Option(metavar="X", min=1e-9, help="Bytes a second that a worker sends to others.")
    ] = 3.5e9,
    link_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="What a transfer takes besides.")
    ] = 0.002,
    json_file: JsonOption = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the distributions there as PNG.")
    ] = None,
) -> None:
    """Simulate a pool of workers under a load, with the router's own placement; shows latencies and goodput.

    With --plan, find the fewest workers that serve the load within the SLOs, or with --models which of them should
    hold which models so that the share of requests within the SLOs is best for the model that has least.
    """
    shared = SharedPrefixes(prefixes, prefix_tokens, prefix_share, zipf) if prefixes else None
    try:
        reject_missing_folders(json=json_file, plot=plot_file)
        if models is not None:
            reject_options_for_one_model(context)
            link = Link(link_seconds, link_rate)
            num_workers = both if both is not None else 1
            fleet = Fleet(num_workers, worker_gib, max_batch_tokens, max_sequences, block_size, link)
            described = read_models(
                models,
                defaults_for_models(context),
                num_requests=requests,
                fleet=fleet,
                prefixes=shared,
                trace=trace,
                seed=seed,
            )
            placed = place_models(described, fleet, seed, search=plan)
            Console(highlight=False).print(placement_table(placed))
            _write_json(json_file, [{"name": name, **run.as_json()} for name, run in placed.items()])
            return
        if plot_file is not None:
            drawing()
        if step_log and step_costs is not None:
            raise ValueError("--step-log and --step-costs both say what steps cost: give one of them")
        costs = (
            linear_costs(step_seconds, tokens_per_second, max_batch_tokens)
            if step_costs is None
            else read_step_costs(step_costs)
        )
        machine = Machine(costs, max_batch_tokens, max_sequences, kv_tokens // block_size, block_size)
        if step_log:
            machine = as_logged(machine, [read_step_log(path) for path in step_log])
        prompt, output = Lengths(prompt_tokens, prompt_variation), Lengths(output_tokens, output_variation)
        workload = Workload(rate, requests, prompt, output, burstiness, shared)
        bench = _Bench(
            list(workload.requests(seed)) if trace is None else read_trace(trace, model),
            machine,
            TransferRates(kv_bytes_per_token, link_seconds, link_rate),
            Objectives(slo_ttft, slo_tpot),
            seed,
        )
        routings = list(dict.fromkeys(routing or [RoutingName.POLICY]))
        if plan and (prefill or decode or both is not None):
            raise ValueError("--plan finds the pools: --prefill, --decode and --both are not for it")
        if plan and len(routings) > 1:
            raise ValueError("--plan takes one --routing")
        if plan:
            runs = _plan(bench, routings[0], attainment, most_workers)
        else:
            pools = Pools(prefill, decode, both if both is not None else int(not prefill and not decode))
            runs = [bench.run(pools, name) for name in routings]
    except (ValueError, PlotUnavailable) as error:
        raise typer.BadParameter(str(error)) from None
    if not runs:
        typer.echo(f"outrider: no pools of up to {most_workers} workers meet the SLOs", err=True)
        raise typer.Exit(1)
    Console(highlight=False).print(_table(runs) if plan else table({run.name: run.summary for run in runs}))
    _write_json(json_file, [run.as_json() for run in runs])
    if plot_file is not None:
        with _written(plot_file):
            plot(plot_file, {run.name: run.outcomes for run in runs}, bench.objectives)


@dataclass(frozen=True, slots=True)
class _Run:
    """A simulation that was made."""

    name: str
    pools: Pools
    outcomes: Outcomes
    summary: Summary

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, **self.pools._asdict(), **self.summary.as_json()}


@dataclass(frozen=True, slots=True)
class _Bench:
    """All of a simulation but pools and routing."""

    requests: Sequence[Request]
    machine: Machine
    rates: TransferRates
    objectives: Objectives
    seed: int

    def run(self, pools: Pools, routing: RoutingName, name: str | None = None) -> _Run:
        outcomes = Cluster(pools, self.machine, self.rates, routing, self.seed).run(self.requests)
        return _Run(name or routing.value, pools, outcomes, summarise(outcomes, self.objectives))


def _plan(bench: _Bench, routing: RoutingName, attainment: float, most_workers: int) -> list[_Run]:
    """The fewest workers that do both, and the fewest in separate pools unless these are more; none if none do."""

    def meets(pools: Pools) -> bool:
        share = bench.run(pools, routing).summary.attainment
        typer.echo(f"{_name(pools)}: {share:.1%} within the SLOs", err=True)
        return share >= attainment

    both = least_of_both(meets, most_workers)
    separate = least_separate(meets, both.num_workers if both is not None else most_workers)
    found = sorted((pools for pools in (separate, both) if pools is not None), key=lambda pools: pools.num_workers)
    return [bench.run(pools, routing, _name(pools)) for pools in found]


def _write_json(path: Path | None, runs: Sequence[Mapping[str, object]]) -> None:
    if path is not None:
        with _written(path):
            path.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """A file that cannot be written is said in a line."""
    try:
        yield
    except OSError as error:
        typer.echo(f"outrider: {path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None


def _name(pools: Pools) -> str:
    if pools.num_both:
        return f"{pools.num_both} both"
    return f"{pools.num_prefill} prefill + {pools.num_decode} decode"


def _table(runs: Sequence[_Run]) -> Table:
    """What is found with --plan: fewest workers first."""
    made = table({run.name: run.summary for run in runs})
    rows: tuple[tuple[str, Callable[[_Run], str]], ...] = (
        ("workers", lambda run: str(run.pools.num_workers)),
        ("goodput per worker", lambda run: f"{run.summary.goodput / run.pools.num_workers:.2f}"),
    )
    for name, text in rows:
        made.add_row(name, *map(text, runs))
    return made
