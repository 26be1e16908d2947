"""Where a service's settings come from: flags, then environment, then a file, then defaults."""

from __future__ import annotations

import os
import re
import tomllib
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

SERVICES = ("router", "target", "draft")

EXIT_CONFIG = 78
"""Exit status of a service that cannot start as it is configured (EX_CONFIG of sysexits.h)."""


class StartupError(Exception):
    """A service cannot start; the message is one line that tells its operator why."""


class SettingsError(StartupError):
    """A setting is missing, unknown or out of range."""


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("must be host:port, with a port from 1 to 65535")
    try:
        # As Kubernetes has it.
        return f"[{IPv6Address(host)}]:{port}"
    except ValueError:
        return value


Address = Annotated[str, AfterValidator(_address)]
"""`host:port` of a gRPC server."""


def _redis_url(value: str) -> str:
    # Left to the client, these would come up later, as a wrong port or host, with a piece of the password in the text.
    try:
        parts = urlsplit(value)
        _ = parts.port
        cut_off = parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment
    except ValueError:
        cut_off = True
    if cut_off:
        raise ValueError(
            "must have a port from 0 to 65535 if any, and what is special in user name or password percent-encoded"
        )
    return value


RedisUrl = Annotated[str, StringConstraints(pattern=r"^(rediss?|unix)://.+"), AfterValidator(_redis_url)]
"""Where a Redis is: redis://, rediss:// or unix://, credentials included."""


class FileSource(PydanticBaseSettingsSource):
    """The service's table of the TOML file named by the `config` setting; unknown names are errors."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read whole, by __call__")

    def __call__(self) -> dict[str, Any]:
        assert issubclass(self.settings_cls, ServiceSettings)
        return _read_table(self.settings_cls, self.current_state.get("config"))


def _read_table(settings: type[ServiceSettings], config: str | Path | None) -> dict[str, Any]:
    """What the service's table of `config` sets, else of the file that the environment names, if any."""
    path = config or os.environ.get("OUTRIDER_CONFIG")
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"config {str(path)!r} is not TOML: {error}") from error
    known_tables = ", ".join(f"[{name}]" for name in SERVICES)
    for name, table in tables.items():
        if name not in SERVICES or not isinstance(table, dict):
            raise SettingsError(f"config {str(path)!r} has {name!r} at its top, where only {known_tables} may stand")
    table = tables.get(settings.service, {})
    for name in table:
        if name not in settings.model_fields or name == "config":
            raise SettingsError(f"config {str(path)!r}: [{settings.service}] has no setting {name!r}")
    return dict(table)


class ServiceSettings(BaseSettings):
    """What every service has. A subclass names its service and adds its own fields, each described.

    A value comes from a keyword argument (the command line's flags), else from the environment
    (`OUTRIDER_<SERVICE>_<NAME>`), else from the service's table in the TOML file that `--config` or
    `OUTRIDER_CONFIG` names, else it is the default.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, env_ignore_empty=True)
    service: ClassVar[str]

    config: Path | None = Field(default=None, description="TOML file with a table for each service.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    tls_cert: Path | None = Field(
        default=None,
        description="PEM certificate chain that this service shows to others, with its name in the deployment; none: "
        "no TLS.",
    )
    tls_key: Path | None = Field(default=None, description="PEM private key of tls_cert.")
    tls_ca: Path | None = Field(
        default=None, description="PEM certificates of the authorities that sign those of a deployment's services."
    )
    token_file: Path | None = Field(
        default=None,
        description="File with a token that a deployment's services share, one a line: the first is shown, each taken.",
    )
    drain_seconds: float = Field(default=30.0, ge=0, description="Time that running requests get to finish on SIGTERM.")
    redis_password_file: Path | None = Field(
        default=None, description="File with the password of redis_url and prefix_store, read at start; unset: in them."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://.+",
        description="OTLP/gRPC endpoint for traces and metrics; none: they are not sent.",
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of health alone, in plain text, for probes that know no TLS; unset: none.",
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port on which Prometheus reads /metrics over HTTP; unset: none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log level shown."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        given = [name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(self, name) is not None]
        if 0 < len(given) < 3:
            raise ValueError(
                f"must have tls_cert, tls_key and tls_ca, or none of them: only {' and '.join(given)} given"
            )
        return self

    @property
    def health_address(self) -> str | None:
        """host:port of health alone."""
        return None if self.health_port is None else f"{self.host}:{self.health_port}"

    def redis_at(self, url: str | None) -> str | None:
        """The URL of a Redis with the password that belongs to it; None of none. Raises SettingsError."""
        if url is None or self.redis_password_file is None:
            return url
        shown = f"{self.service} setting redis_password_file is {str(self.redis_password_file)!r}"
        try:
            password = self.redis_password_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SettingsError(f"{shown}, which cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{shown}, which is not UTF-8") from error
        if not password:
            raise SettingsError(f"{shown}, which is empty")
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        if ":" in user:
            raise SettingsError(f"{shown}, and there is a password in the URL of {host or 'a socket'} as well")
        return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file, in this order."""
        return init_settings, cls._environment(), FileSource(settings_cls)

    @classmethod
    def _environment(cls) -> EnvSettingsSource:
        return EnvSettingsSource(cls, env_prefix=cls.environment_name(""))

    @classmethod
    def environment_name(cls, name: str) -> str:
        """The environment variable of a setting."""
        return "OUTRIDER_CONFIG" if name == "config" else f"OUTRIDER_{cls.service}_{name}".upper()

    @classmethod
    def load(cls, **flags: object) -> Self:
        """Settings from all sources; flags that are None were not given.

        Raises SettingsError naming each wrong setting, its value and what is allowed.
        """
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]
        except ValidationError as error:
            raise SettingsError("; ".join(cls._complaint(detail) for detail in error.errors())) from None

    @classmethod
    def without_flags(cls, config: str | None) -> dict[str, object]:
        """What the environment sets, else the file `config`, as it stands there: what flags win over.

        Raises SettingsError if the file cannot be used.
        """
        return {**_read_table(cls, config), **cls._environment()()}

    @classmethod
    def _complaint(cls, detail: ErrorDetails) -> str:
        """One validation error, in the words of whoever has to mend it."""
        allowed = detail["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
        if not detail["loc"]:  # of several settings together
            return f"{cls.service} settings {allowed}"
        name = str(detail["loc"][0])
        flag = f"--{name.replace('_', '-')}"
        setting = f"{cls.service} setting {name} ({flag}, {cls.environment_name(name)})"
        if detail["type"] == "missing":
            return f"{setting} is required"
        if detail["type"] == "extra_forbidden":
            return f"{cls.service} has no setting {name}"
        value = "(hidden)" if is_secret(cls.model_fields[name]) else repr(without_credentials(detail["input"]))
        return f"{setting} is {value}: {allowed}"


def is_secret(field: FieldInfo) -> bool:
    """Whether a field's value must never be shown."""

    def holds_secret(annotation: Any) -> bool:
        return annotation is SecretStr or any(holds_secret(argument) for argument in get_args(annotation))

    return holds_secret(field.annotation)


def without_credentials(value: object) -> object:
    """`value` as it may be shown: of a text with an "@" or "?", as URLs have, without user, password and query.

    Also of one that is no URL: a password may well be what is wrong with it.
    """
    if not isinstance(value, str):
        return value
    text, query, _ = value.partition("?") if "://" in value else (value, "", "")
    before, at, host = text.rpartition("@")
    scheme = re.match(r"[a-z]+://", before)
    shown = f"{scheme.group() if scheme else ''}…@{host}" if at else text
    return f"{shown}?…" if query else shown
