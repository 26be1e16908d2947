"""The command line: help that reads, and one line for what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.launcher import PREPARED
from services.cli.main import main
from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.rpc.server import BindError
from shared.settings import ServiceSettings, StartupError

SERVICES = (RouterSettings, TargetSettings, DraftSettings)


def help_of(*command: str) -> str:
    """A command's help, its lines joined and its frames taken off."""
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=100)
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", " ", result.output))


def test_help_lists_every_command() -> None:
    text = help_of()
    for command in ("up", "generate", "demo", "router", "target", "draft"):
        assert f" {command} " in text


@pytest.mark.parametrize("settings_class", SERVICES)
def test_a_service_takes_every_setting_as_an_option(settings_class: type[ServiceSettings]) -> None:
    text = help_of(settings_class.service)
    assert f"[{settings_class.service}] table" in text
    for name, field in settings_class.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description is not None
        assert field.description in text


@pytest.mark.parametrize("command", ["up", "generate", "demo"])
def test_help_of_the_other_commands_reads(command: str) -> None:
    text = help_of(command)
    assert "Usage: " in text
    assert "…" not in text  # no option too long for its column


def test_help_loads_no_torch() -> None:
    code = "import sys, services.cli.app; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["target"], "outrider: target setting model (--model, OUTRIDER_TARGET_MODEL) is required\n"),
        (
            ["target", "--model=x", "--block-size=9"],
            "outrider: target setting block_size (--block-size, OUTRIDER_TARGET_BLOCK_SIZE) is '9': "
            "must be a power of two from 8 to 256\n",
        ),
        (
            ["router", "--tokenizer=x", "--targets=nowhere"],
            "outrider: router setting targets (--targets, OUTRIDER_ROUTER_TARGETS) is 'nowhere': "
            "must be host:port, with a port from 1 to 65535\n",
        ),
    ],
)
def test_a_wrong_setting_ends_with_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 78
    assert capsys.readouterr() == ("", complaint)


@pytest.mark.parametrize("error", [StartupError, BindError])
def test_a_service_gets_its_settings_and_its_startup_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    served: list[ServiceSettings] = []

    async def serve(settings: ServiceSettings) -> None:
        served.append(settings)
        raise error("model folder /nowhere has no config.json")

    server = ModuleType("services.draft.server")
    monkeypatch.setattr(server, "serve", serve, raising=False)
    monkeypatch.setitem(sys.modules, "services.draft.server", server)
    monkeypatch.setattr("shared.telemetry.logs.configure_logging", lambda service, level: None)
    monkeypatch.setenv(PREPARED, "already")
    with pytest.raises(SystemExit) as ended:
        main(["draft", "--model=/nowhere", "--optimistic", "--max-candidates=7"])
    assert ended.value.code == 78
    assert capsys.readouterr().err == "outrider: model folder /nowhere has no config.json\n"
    assert served == [DraftSettings(model="/nowhere", optimistic=True, max_candidates=7)]


def test_generate_without_a_server_says_so_in_one_line() -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--address=127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.stderr == "outrider: no server answers at 127.0.0.1:9\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-targets=0"], "there must be workers that decode"),
        (["--num-drafts=0", "--draft=copy"], "target workers copy by themselves"),
        (["--num-drafts=0", "--early-exit=2"], "drafts inside the target workers"),
    ],
)
def test_a_stack_that_would_not_draft_or_decode_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["up", *options], terminal_width=200)
    assert result.exit_code == 2
    assert said in re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert re.fullmatch(r"outrider \d+\.\d+\.\d+\n", result.output)
