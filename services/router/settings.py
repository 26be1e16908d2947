"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.registry.setting import DEPLOYMENT_DESCRIPTION, Deployment
from shared.settings import Address, RedisUrl, ServiceSettings


def _comma_separated(value: Any) -> Any:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _comma_separated_pairs(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
    if not all(name and key for name, _, key in pairs):
        raise ValueError("must be name=key,name=key")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError("must name each tenant once")
    return {name: key for name, _, key in pairs}


# A varint of a vocabulary of up to 2**21 tokens, packed.
_BYTES_PER_TOKEN_ID = 3
# Stop strings (16 of 256 characters), logit_bias (1024 entries) and the rest take less than 40 KiB.
_OTHER_FIELDS_BYTES = 64 * 1024


class RouterSettings(ServiceSettings):
    """The router: its workers, its limits and its tenants."""

    service: ClassVar[str] = "router"

    port: int = Field(default=50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    targets: Annotated[list[Address], NoDecode, BeforeValidator(_comma_separated)] = Field(
        default=[],
        description="Target workers, host:port, separated by commas; none: all workers that register in Redis.",
    )
    drafts: Annotated[list[Address], NoDecode, BeforeValidator(_comma_separated)] = Field(
        default=[],
        description="Draft workers, host:port, separated by commas, beside named targets only; none: no draft worker, "
        "or with no targets named those that register in Redis.",
    )
    deployment: Deployment = Field(default=DEFAULT_DEPLOYMENT, description=DEPLOYMENT_DESCRIPTION)
    public_cert: Path | None = Field(
        default=None, description="PEM certificate chain that clients are shown; unset: tls_cert."
    )
    public_key: Path | None = Field(default=None, description="PEM private key of public_cert.")
    client_ca: Path | None = Field(
        default=None,
        description="PEM certificates of the authorities that sign those of clients, who have to show one then.",
    )
    tokenizer: str = Field(min_length=1, description="The target's tokenizer: its model folder or hub name.")
    redis_url: RedisUrl | None = Field(
        default=None,
        description="Redis with the prefix index, and the workers if none are named (redis://, rediss:// or unix://).",
    )
    prefix_store: RedisUrl | None = Field(
        default=None,
        description="The target workers' prefix_store, if they have one: placement asks it how long a prefix it holds.",
    )
    max_running: int = Field(default=64, ge=1, description="Sequences served at once (a request has n).")
    max_waiting: int = Field(default=256, ge=0, description="Requests that may wait; beyond, RESOURCE_EXHAUSTED.")
    max_num_draft_tokens: int = Field(
        default=8, ge=0, le=16, description="Most draft tokens in a round of adaptive length, 0 to 16."
    )
    max_num_nodes: int = Field(
        default=16, ge=0, le=64, description="Most draft tokens of a tree of adaptive shape, 0 to 64; 0: chains alone."
    )
    failover_seconds: float = Field(
        default=60.0, ge=0, description="How long a stream waits for a target worker to come back."
    )
    api_keys: Annotated[dict[str, SecretStr], NoDecode, BeforeValidator(_comma_separated_pairs)] = Field(
        default={}, description="API keys by tenant, name=key,name=key; none: no authentication."
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="TOML file of API keys by SHA-256, with their tenants and limits (`outrider key` makes them); read "
        "again when it changes.",
    )
    cache_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Secret of 16 characters or more that tenants' cache salts derive from; unset: drawn at start.",
    )
    max_prompt_bytes: int = Field(
        default=1 << 20, ge=1, description="Longest prompt: bytes of text or chat, or token ids."
    )

    @model_validator(mode="after")
    def _finds_workers(self) -> Self:
        if not self.targets and self.redis_url is None:
            raise ValueError("must name target workers, or redis_url where they register")
        if self.drafts and not self.targets:
            raise ValueError("must name target workers as well where draft workers are named")
        return self

    @model_validator(mode="after")
    def _one_source_of_keys(self) -> Self:
        if self.api_keys and self.api_keys_file is not None:
            raise ValueError("must have api_keys or api_keys_file, not both")
        return self

    @model_validator(mode="after")
    def _public_tls_is_whole(self) -> Self:
        if (self.public_cert is None) != (self.public_key is None):
            raise ValueError("must have public_cert and public_key, or neither")
        if self.client_ca is not None and self.public_cert is None and self.tls_cert is None:
            raise ValueError("must have public_cert or tls_cert where client_ca is given")
        return self

    @property
    def max_request_bytes(self) -> int:
        """Longest request on the wire: that of a prompt of `max_prompt_bytes` token ids, and all else at its limit.

        So of any prompt that its text may have, since no token has less than a byte of it, whatever the context.
        """
        return self.max_prompt_bytes * _BYTES_PER_TOKEN_ID + _OTHER_FIELDS_BYTES
