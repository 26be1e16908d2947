"""Several models as a file describes them: TOML, a table for each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.simulator.costs import linear_costs, read_step_costs
from services.simulator.model import Fleet, Model
from services.simulator.report import Objectives
from services.simulator.trace import read_traces
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.step_costs import StepCosts


class ModelsError(ValueError):
    """A description of models that cannot be used; the message is one line and names file, model and field."""


class Description(BaseModel):
    """A model as its table has it. What the table leaves out is as for a single model."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    weights_gib: float = Field(ge=0)
    kv_bytes_per_token: float = Field(ge=1)
    # A step takes step_seconds, and its tokens more at tokens_per_second, unless step_costs, a file, has measured ones.
    step_seconds: float = Field(gt=0)
    tokens_per_second: float = Field(gt=0)
    step_costs: str | None = None
    # Requests a second, and how they vary, unless a trace has them.
    rate: float = Field(gt=0)
    burstiness: float = Field(ge=0)
    prompt_tokens: float = Field(ge=1)
    prompt_variation: float = Field(ge=0)
    output_tokens: float = Field(ge=1)
    output_variation: float = Field(ge=0)
    slo_ttft: float = Field(ge=0)
    slo_tpot: float = Field(ge=0)


def read_descriptions(path: Path, defaults: Mapping[str, object]) -> dict[str, Description]:
    """The models of a file, by their names. Raises ModelsError.

    `defaults`: values of fields that a table leaves out, but that steps are measured ones by default only if it says
    nothing of steps. Files of step costs are named from where this file is.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelsError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelsError(f"{path}: not TOML: {error}") from error
    if not tables:
        raise ModelsError(f"{path}: no models: must have a table for each")
    return {name: _description(path, name, table, defaults) for name, table in tables.items()}


def read_models(
    path: Path,
    defaults: Mapping[str, object],
    *,
    num_requests: int,
    fleet: Fleet,
    prefixes: SharedPrefixes | None,
    trace: Path | None,
    seed: int,
) -> list[Model]:
    """The models of a file, as `read_descriptions` has them, with their loads.

    These are those of the trace, which has the models' names, or made up: `num_requests` of all models together, over
    the same time. Raises ModelsError (also if a worker of the fleet has no room for one), CostsError, TraceError.
    """
    descriptions = read_descriptions(path, defaults)
    if trace is None:
        requests = _made_up(descriptions, num_requests, prefixes, seed)
    else:
        requests = read_traces(trace, list(descriptions))
    models = []
    for name, each in descriptions.items():
        model = Model(
            name,
            _costs(each, fleet.max_batch_tokens),
            each.weights_gib,
            each.kv_bytes_per_token,
            requests[name],
            Objectives(each.slo_ttft, each.slo_tpot),
        )
        if not fleet.holds([model]):
            raise ModelsError(
                f"{path}, model {name!r}: field weights_gib is {each.weights_gib:g}: a worker of {fleet.worker_gib:g} "
                f"GiB must have room for {fleet.gib(model):.4g}, with the KV of the longest request, "
                f"{model.longest} tokens"
            )
        models.append(model)
    return models


def _description(path: Path, name: str, table: object, defaults: Mapping[str, object]) -> Description:
    if not isinstance(table, dict):
        raise ModelsError(f"{path}: {name!r} is {table!r}: must be the table of a model, [{name}]")
    values = {**defaults, **table}
    if "step_costs" not in table and table.keys() & {"step_seconds", "tokens_per_second"}:
        values["step_costs"] = None
    try:
        found = Description.model_validate(values)
        if found.step_costs is not None and "step_costs" in table:
            return found.model_copy(update={"step_costs": str(path.parent / found.step_costs)})
        return found
    except ValidationError as error:
        detail = error.errors()[0]
    where = f"{path}, model {name!r}: field {detail['loc'][0]}"
    if detail["type"] == "missing":
        raise ModelsError(f"{where} is missing")
    if detail["type"] == "extra_forbidden":
        raise ModelsError(f"{where} is not known: must be one of {', '.join(Description.model_fields)}")
    raise ModelsError(f"{where} is {detail['input']!r}: {detail['msg'].replace('Input should', 'must')}")


def _made_up(
    descriptions: Mapping[str, Description], num_requests: int, prefixes: SharedPrefixes | None, seed: int
) -> dict[str, list[Request]]:
    seconds = num_requests / sum(each.rate for each in descriptions.values())
    requests = {}
    for name, each in descriptions.items():
        workload = Workload(
            each.rate,
            max(1, round(each.rate * seconds)),
            Lengths(each.prompt_tokens, each.prompt_variation),
            Lengths(each.output_tokens, each.output_variation),
            each.burstiness,
            prefixes,
        )
        # Each model has bursts of its own.
        requests[name] = list(workload.requests(f"{seed} {name}"))
    return requests


def _costs(description: Description, max_batch_tokens: int) -> StepCosts:
    if description.step_costs is not None:
        return read_step_costs(Path(description.step_costs))
    return linear_costs(description.step_seconds, description.tokens_per_second, max_batch_tokens)
