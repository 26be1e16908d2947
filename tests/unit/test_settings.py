"""Settings: where each value comes from, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.v1 import inference_pb2
from redis.connection import parse_url

from services.cli.settings_table import SETTINGS, settings_table
from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.settings import ServiceSettings, SettingsError

FILE = """
[router]
tokenizer = "from-file"
targets = ["file:1"]
max_running = 3
[router.api_keys]
acme = "key-of-acme"
[target]
model = "from-file"
num_blocks = 30
block_size = 32
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outrider.toml"
    path.write_text(FILE)
    return path


def test_flags_win_over_environment_over_file_over_default(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = TargetSettings.load(config=config)
    assert (loaded.num_blocks, loaded.block_size, loaded.max_sequences) == (30, 32, 256)
    monkeypatch.setenv("OUTRIDER_TARGET_NUM_BLOCKS", "31")
    monkeypatch.setenv("OUTRIDER_DRAFT_BLOCK_SIZE", "64")  # another service's
    loaded = TargetSettings.load(config=config)
    assert (loaded.num_blocks, loaded.block_size, loaded.model) == (31, 32, "from-file")
    assert TargetSettings.load(config=config, num_blocks="32").num_blocks == 32
    assert TargetSettings.load(config=config, num_blocks=None).num_blocks == 31


def test_file_may_be_named_by_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CONFIG", str(config))
    assert TargetSettings.load().model == "from-file"
    other = config.with_name("other.toml")
    other.write_text('[target]\nmodel = "other"')
    assert TargetSettings.load(config=other).model == "other"


def test_lists_and_secrets(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = RouterSettings.load(config=config)
    assert loaded.targets == ["file:1"]
    assert loaded.api_keys["acme"].get_secret_value() == "key-of-acme"
    assert "key-of-acme" not in repr(loaded)
    monkeypatch.setenv("OUTRIDER_ROUTER_TARGETS", "one:1, two:2")
    monkeypatch.setenv("OUTRIDER_ROUTER_API_KEYS", "a=b,c=d=e")
    loaded = RouterSettings.load(config=config)
    assert loaded.targets == ["one:1", "two:2"]
    assert {name: key.get_secret_value() for name, key in loaded.api_keys.items()} == {"a": "b", "c": "d=e"}


@pytest.mark.parametrize(
    ("settings_class", "name", "value", "allowed"),
    [
        (TargetSettings, "block_size", "12", "must be a power of two from 8 to 256"),
        (TargetSettings, "block_size", "512", "must be a power of two from 8 to 256"),
        (TargetSettings, "block_size", "0", "must be a power of two from 8 to 256"),
        (TargetSettings, "port", "65536", "should be less than or equal to 65535"),
        (TargetSettings, "port", "http", "should be a valid integer"),
        (TargetSettings, "device", "gpu", "must be auto, cpu, cuda or cuda:N"),
        (TargetSettings, "dtype", "int8", "should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (TargetSettings, "kv_cache_gib", "0", "should be greater than 0"),
        (TargetSettings, "kv_cache_gib", "nan", "should be a finite number"),
        (TargetSettings, "max_batch_tokens", "16", "should be greater than or equal to 17"),
        (TargetSettings, "num_threads", "0", "should be greater than or equal to 1"),
        (TargetSettings, "redis_url", "localhost:6379", "should match pattern '^(rediss?|unix)://.+'"),
        (DraftSettings, "proposal_mass", "1.01", "should be less than or equal to 1"),
        (DraftSettings, "optimistic", "perhaps", "should be a valid boolean"),
        (DraftSettings, "log_level", "loud", "should be 'debug', 'info', 'warning' or 'error'"),
        (RouterSettings, "drafts", "localhost", "must be host:port"),
        (RouterSettings, "max_num_draft_tokens", "17", "should be less than or equal to 16"),
        (RouterSettings, "drain_seconds", "-1", "should be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    settings_class: type[ServiceSettings], name: str, value: str, allowed: str
) -> None:
    required = {"targets": "one:1", "tokenizer": "model"} if settings_class is RouterSettings else {"model": "model"}
    with pytest.raises(SettingsError) as raised:
        settings_class.load(**{**required, name: value})
    message = str(raised.value)
    variable = f"OUTRIDER_{settings_class.service}_{name}".upper()
    flag = f"--{name.replace('_', '-')}"
    assert message.startswith(f"{settings_class.service} setting {name} ({flag}, {variable}) is {value!r}: {allowed}")
    assert "\n" not in message


def test_an_address_of_ipv6_gets_its_brackets() -> None:
    loaded = TargetSettings.load(model="model", advertise="fd00::1:2:50052")
    assert loaded.advertise == "[fd00::1:2]:50052"
    assert TargetSettings.load(model="model", advertise="[fd00::1]:1").advertise == "[fd00::1]:1"
    assert TargetSettings.load(model="model", advertise="worker-0:1").advertise == "worker-0:1"


def test_every_wrong_setting_is_named_in_one_line() -> None:
    with pytest.raises(SettingsError) as raised:
        TargetSettings.load(port="x", dtype="y")
    message = str(raised.value)
    assert "setting model (--model, OUTRIDER_TARGET_MODEL) is required" in message
    assert "'x'" in message
    assert "'y'" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"), [("api_keys", "hush-hush"), ("api_keys", "a=,b=hush"), ("cache_secret", "hush")]
)
def test_secrets_are_not_repeated_in_complaints(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=r"is \(hidden\): ") as raised:
        RouterSettings.load(targets="one:1", tokenizer="model", **{name: value})
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("settings_class", [RouterSettings, TargetSettings])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis//:hush@cache:6379", "'…@cache:6379'"),
        ("http://:hush@cache:6379/0", "'http://…@cache:6379/0'"),
        ("user:hush@cache:6379", "'…@cache:6379'"),
        ("user:hu@sh@cache:6379", "'…@cache:6379'"),
        ("http://cache:6379?password=hush", "'http://cache:6379?…'"),
        # What would be a URL, were the password encoded: its beginning passes for a port, its rest for a path.
        ("redis://:hu/sh@cache:6379", "'redis://…@cache:6379'"),
        ("redis://:12/hush@cache:6379", "'redis://…@cache:6379'"),
        ("redis://user:hu#sh@cache", "'redis://…@cache'"),
        ("redis://user:hu[sh@cache", "'redis://…@cache'"),
        ("redis://user:hush\u2100@cache", "'redis://…@cache'"),
        ("redis://user:hush@cache:port", "'redis://…@cache:port'"),
    ],
)
def test_a_wrong_redis_url_is_shown_without_its_password(
    settings_class: type[ServiceSettings], value: str, shown: str
) -> None:
    required = {"targets": "one:1", "tokenizer": "model"} if settings_class is RouterSettings else {"model": "model"}
    with pytest.raises(SettingsError) as raised:
        settings_class.load(**required, redis_url=value)
    message = str(raised.value)
    assert f" is {shown}: " in message
    for secret in ("hush", "hu/sh", "hu", "sh@", "user"):
        assert secret not in message.replace("should", "").replace("user name", "")


@pytest.mark.parametrize(
    "value",
    [
        "redis://cache",
        "redis://:p%2Fw@cache:6379/0?socket_keepalive=yes",
        "rediss://user:pw@cache",
        "unix:///run/redis.sock",
        "unix://:pw@/run/a@b.sock?db=1",
    ],
)
def test_a_redis_url_is_taken_as_it_is(value: str) -> None:
    assert TargetSettings.load(model="model", redis_url=value).redis_url == value


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache:6379/0", "redis://:p%2Fw%40%C3%BC@cache:6379/0"),
        ("rediss://outrider@cache?ssl_ca_certs=/ca.pem", "rediss://outrider:p%2Fw%40%C3%BC@cache?ssl_ca_certs=/ca.pem"),
        ("unix:///run/redis.sock", "unix://:p%2Fw%40%C3%BC@/run/redis.sock"),
    ],
)
def test_a_redis_password_comes_from_its_file(tmp_path: Path, url: str, expected: str) -> None:
    password = tmp_path / "password"
    password.write_text("p/w@ü\n")
    settings = TargetSettings.load(model="model", redis_url=url, redis_password_file=password)
    assert settings.redis_at(settings.redis_url) == expected
    assert parse_url(expected)["password"] == "p/w@ü"  # type: ignore[no-untyped-call]
    assert settings.redis_at(None) is None
    assert TargetSettings.load(model="model", redis_url=url).redis_at(url) == url


@pytest.mark.parametrize(
    ("content", "url", "complaint"),
    [
        (None, "redis://cache", "which cannot be read: No such file or directory"),
        (b"\xff", "redis://cache", "which is not UTF-8"),
        (b" \n", "redis://cache", "which is empty"),
        (b"hush", "redis://user:other@cache:6379", "and there is a password in the URL of cache:6379 as well"),
        (b"hush", "unix://:other@/run/redis.sock", "and there is a password in the URL of a socket as well"),
    ],
)
def test_a_wrong_redis_password_file_is_told(tmp_path: Path, content: bytes | None, url: str, complaint: str) -> None:
    password = tmp_path / "password"
    if content is not None:
        password.write_bytes(content)
    settings = RouterSettings.load(tokenizer="model", redis_url=url, redis_password_file=password)
    with pytest.raises(SettingsError) as caught:
        settings.redis_at(url)
    assert str(caught.value) == f"router setting redis_password_file is '{password}', {complaint}"


@pytest.mark.parametrize("targets", ["localhost", "one:1,two", "one:0", "one:65536", ":1"])
def test_targets_are_addresses(targets: str) -> None:
    with pytest.raises(SettingsError, match="router setting targets"):
        RouterSettings.load(targets=targets, tokenizer="model")


def test_a_router_must_know_where_its_workers_are() -> None:
    with pytest.raises(SettingsError, match=r"^router settings must name target workers, or redis_url where"):
        RouterSettings.load(targets="", tokenizer="model")
    with pytest.raises(SettingsError, match=r"^router settings must name target workers as well") as caught:
        RouterSettings.load(drafts="one:1", redis_url="redis://:secret@cache", tokenizer="model")
    assert "secret" not in str(caught.value)
    assert RouterSettings.load(redis_url="redis://cache", tokenizer="model").targets == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('[target]\nmodle = "x"', r"\[target\] has no setting 'modle'"),
        ("[worker]\nport = 1", r"has 'worker' at its top, where only \[router\], \[target\], \[draft\] may stand"),
        ("port = 1", "has 'port' at its top"),
        ("[target", "is not TOML"),
        ('[target]\nconfig = "x"', "has no setting 'config'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        TargetSettings.load(config=path, model="x")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.toml' cannot be read: No such file"):
        TargetSettings.load(config=tmp_path / "nothing.toml", model="x")


@pytest.mark.parametrize("max_prompt_bytes", [1, 5000, 1 << 20])
def test_the_longest_request_has_room_for_the_longest_prompt_and_all_else(max_prompt_bytes: int) -> None:
    """Every field at its limit, ids of three bytes each, strings of the widest characters."""
    settings = RouterSettings.load(targets="one:1", tokenizer="model", max_prompt_bytes=max_prompt_bytes)
    most = 2**32 - 1
    request = inference_pb2.GenerateRequest(
        max_tokens=most,
        min_tokens=most,
        temperature=1,
        top_k=most,
        top_p=1,
        min_p=1,
        repetition_penalty=1,
        presence_penalty=1,
        frequency_penalty=1,
        seed=2**64 - 1,
        logit_bias={most - index: 1.0 for index in range(1024)},
        stop=["\U0001f389" * 256] * 16,
        stop_token_ids=[most] * 64,
        ignore_eos=True,
        n=16,
        logprobs=20,
        speculation=inference_pb2.Speculation(enabled=True, num_draft_tokens=16),
        include_usage=True,
        include_draft_tokens=True,
    )
    request.token_ids.ids.extend([2**21 - 1] * max_prompt_bytes)
    assert request.ByteSize() <= settings.max_request_bytes < request.ByteSize() + 64 * 1024


def test_every_setting_is_described_and_stands_in_the_table() -> None:
    table = settings_table()
    for settings_class in SETTINGS:
        for name, field in settings_class.model_fields.items():
            assert field.description, name
            assert f"| `{name}` |" in table
    assert "| `port` | draft | `50053` |" in table
    assert "| `host` | all | `127.0.0.1` |" in table
