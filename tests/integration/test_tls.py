"""Services that know each other by certificates and tokens: who is let in, who is not, and files that are replaced."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.certs import write_certificates
from services.cli.ports import free_ports
from services.cli.stack import router_identity
from services.router.listener import public_credentials
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.rpc.channel import connect
from shared.rpc.server import RpcServer
from shared.security.identity import Identity
from shared.security.token import parse_tokens
from shared.security.watched_files import WatchedFiles
from shared.settings import SettingsError, StartupError
from shared.telemetry.tracing import configure
from shared.worker.server import worker_server
from tests.support.service import running_stack

DAY = timedelta(days=1)
TOKEN, OLD_TOKEN, OTHER_TOKEN = "0123456789abcdef", "fedcba9876543210", "a token of others"


class Target(target_pb2_grpc.TargetServicer):
    """Has a name, and answers each message of a stream."""

    async def GetWorkerInfo(self, request: worker_pb2.GetWorkerInfoRequest, context: Any) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(model="ours")

    async def GetWorkerState(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[target_pb2.TargetResponse]:
        async for _ in requests:
            yield target_pb2.TargetResponse()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of ours, of another deployment by the same authority, and by an authority of strangers."""
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder / "ours", "default", ["localhost", "127.0.0.1"], DAY)
    (folder / "neighbours").mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        shutil.copy(folder / "ours" / name, folder / "neighbours" / name)
    write_certificates(folder / "neighbours", "other", [], DAY)
    write_certificates(folder / "strangers", "default", [], DAY)
    return folder


@pytest.fixture
def certificates(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "certificates"))


def settings(folder: Path | None = None, service: str = "target", **others: Any) -> TargetSettings:
    if folder is not None:
        others |= {
            "tls_cert": folder / f"{service}.pem",
            "tls_key": folder / f"{service}-key.pem",
            "tls_ca": folder / "ca.pem",
        }
    return TargetSettings.load(model="unused", port=0, **others)


def identity(folder: Path | None = None, service: str = "target", **others: Any) -> Identity:
    return Identity.of(settings(folder, service, **others), "default")


def token_file(path: Path, *tokens: str) -> Path:
    path.write_text("\n".join(tokens) + "\n")
    return path


@asynccontextmanager
async def target(own: TargetSettings) -> AsyncIterator[RpcServer]:
    telemetry = configure("test", None)
    server = worker_server(own, Identity.of(own, "default"), telemetry, callers=("router", "target"))
    server.add("outrider.v1.Target", target_pb2_grpc.add_TargetServicer_to_server, Target())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def outcome(channel: grpc.aio.Channel) -> str:
    """The model's name, or the status."""
    async with channel:
        try:
            stub: Any = target_pb2_grpc.TargetStub(channel)
            return str((await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=10)).model)
        except grpc.aio.AioRpcError as error:
            return error.code().name


@pytest.mark.parametrize(
    ("folder", "service", "expected"),
    [
        ("ours", "router", "ours"),
        ("ours", "target", "ours"),
        ("ours", "draft", "PERMISSION_DENIED"),
        ("ours", "client", "PERMISSION_DENIED"),
        ("neighbours", "router", "PERMISSION_DENIED"),
        ("strangers", "router", "UNAVAILABLE"),
        (None, "nobody", "UNAVAILABLE"),
    ],
)
async def test_who_may_call_a_target_worker(made: Path, folder: str | None, service: str, expected: str) -> None:
    async with target(settings(made / "ours")) as server:
        if folder is None:
            assert await outcome(connect(server.address)) == expected
            roots = grpc.ssl_channel_credentials((made / "ours" / "ca.pem").read_bytes())
            name = (("grpc.ssl_target_name_override", "target.default.outrider"),)
            assert await outcome(grpc.aio.secure_channel(server.address, roots, name)) == expected
            return
        caller = identity(made / folder, service)
        # Who it calls it knows by the names of its own deployment: those are right here.
        assert await outcome(caller.connect(server.address, "target")) == expected


async def test_a_message_of_a_stream_needs_a_right_caller_too(made: Path) -> None:
    async with target(settings(made / "ours")) as server:
        for service, allowed in (("router", True), ("draft", False)):
            async with identity(made / "ours", service).connect(server.address, "target") as channel:
                stub: Any = target_pb2_grpc.TargetStub(channel)
                call = stub.Serve()
                if allowed:
                    await call.write(target_pb2.TargetRequest())
                    assert await call.read() == target_pb2.TargetResponse()
                    call.cancel()
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call.read()
                    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                    assert "draft.default.outrider" in str(caught.value.details())


@pytest.mark.parametrize(("folder", "service"), [("ours", "draft"), ("neighbours", "target"), ("strangers", "target")])
async def test_who_is_not_taken_for_a_target_worker(made: Path, folder: str, service: str) -> None:
    async with target(settings(made / folder, service)) as server:
        assert await outcome(identity(made / "ours", "router").connect(server.address, "target")) == "UNAVAILABLE"


async def test_a_subject_is_no_name(certificates: Path) -> None:
    """Authorities often sign any subject: what counts is subjectAltName."""
    ours = certificates / "ours"
    authority = x509.load_pem_x509_certificate((ours / "ca.pem").read_bytes())
    signing = load_pem_private_key((ours / "ca-key.pem").read_bytes(), password=None)
    key = load_pem_private_key((ours / "client-key.pem").read_bytes(), password=None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.now(UTC)
    forged = (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router.default.outrider")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .sign(signing, hashes.SHA256())
    )
    (ours / "client.pem").write_bytes(forged.public_bytes(Encoding.PEM))
    async with target(settings(ours)) as server:
        assert await outcome(identity(ours, "client").connect(server.address, "target")) == "PERMISSION_DENIED"


async def test_an_expired_certificate(certificates: Path) -> None:
    write_certificates(certificates / "ours", "default", [], timedelta(minutes=-1))
    router = identity(certificates / "ours", "router")
    async with target(settings(certificates / "ours")) as server:
        assert await outcome(router.connect(server.address, "target")) == "UNAVAILABLE"


async def test_certificates_are_replaced_under_streams_that_go_on(certificates: Path) -> None:
    """Also the authority: from then on the old certificates count for nothing."""
    old = identity(certificates / "ours", "router")
    async with target(settings(certificates / "ours")) as server:
        async with old.connect(server.address, "target") as channel:
            stub: Any = target_pb2_grpc.TargetStub(channel)
            call = stub.Serve()
            await call.write(target_pb2.TargetRequest())
            assert await call.read() == target_pb2.TargetResponse()
            before = old.generation
            for file in (certificates / "strangers").iterdir():
                shutil.copy(file, certificates / "ours" / file.name)
            assert await outcome(old.connect(server.address, "target")) == "ours"
            assert old.generation != before
            await call.write(target_pb2.TargetRequest())
            assert await call.read() == target_pb2.TargetResponse()
            call.cancel()
        late = identity(certificates / "neighbours", "router")
        assert await outcome(late.connect(server.address, "target")) == "UNAVAILABLE"


async def test_files_that_do_not_fit_any_more_change_nothing(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = identity(certificates / "ours", "router")
    async with target(settings(certificates / "ours")) as server:
        shutil.copy(certificates / "ours" / "draft-key.pem", certificates / "ours" / "target-key.pem")
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert await outcome(router.connect(server.address, "target")) == "ours"
        (line,) = [each.getMessage() for each in caplog.records if "still in use" in each.getMessage()]
        assert "the private key is not that of the certificate" in line
        (certificates / "ours" / "target.pem").unlink()
        assert await outcome(router.connect(server.address, "target")) == "ours"


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("target.pem", None, "cannot be read"),
        ("target.pem", b"", "no certificate"),
        ("ca.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no certificate of an authority"),
        ("target-key.pem", b"secret stuff", "no private key, or one with a passphrase"),
    ],
)
def test_files_that_cannot_be_used(certificates: Path, file: str, content: bytes | None, complaint: str) -> None:
    path = certificates / "ours" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=complaint) as caught:
        identity(certificates / "ours")
    assert "secret stuff" not in str(caught.value)


def test_a_file_replaced_by_one_as_old_and_as_long(tmp_path: Path) -> None:
    """As copies that keep times are."""
    path = token_file(tmp_path / "token", TOKEN)
    files = WatchedFiles([path], parse_tokens)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    token_file(path, OLD_TOKEN)
    os.utime(path, ns=times)
    assert files.current() == (OLD_TOKEN,)


def test_an_authority_is_not_replaced_by_mistake(certificates: Path) -> None:
    ours = certificates / "ours"
    (ours / "ca-key.pem").unlink()
    before = (ours / "ca.pem").read_bytes()
    result = CliRunner().invoke(app, ["certs", str(ours)])
    assert (result.exit_code, (ours / "ca.pem").read_bytes()) == (1, before)
    assert result.stderr == f"outrider: no certificates in {ours}: ca.pem is there, and ca-key.pem is not\n"


def test_tls_needs_all_of_its_files(made: Path) -> None:
    with pytest.raises(SettingsError, match="tls_cert, tls_key and tls_ca, or none of them: only tls_cert given"):
        settings(tls_cert=made / "ours" / "target.pem")


async def test_health_can_be_had_without_tls(made: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    async with target(settings(made / "ours", health_port=port)) as server:

        async def health() -> str:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        assert await health() == "NOT_SERVING"
        await server.set_serving(True)
        assert await health() == "SERVING"
        # And nothing else.
        assert await outcome(connect(f"127.0.0.1:{port}")) == "UNIMPLEMENTED"
    with pytest.raises(grpc.aio.AioRpcError):
        await health()


# Tokens


async def test_who_shows_a_token(tmp_path: Path) -> None:
    file = token_file(tmp_path / "token", TOKEN, OLD_TOKEN)
    async with target(settings(token_file=file)) as server:
        for shown, expected in ((TOKEN, "ours"), (OLD_TOKEN, "ours"), (OTHER_TOKEN, "UNAUTHENTICATED")):
            caller = identity(token_file=token_file(tmp_path / "shown", shown))
            assert await outcome(caller.connect(server.address, "target")) == expected
        assert await outcome(connect(server.address)) == "UNAUTHENTICATED"


async def test_a_token_is_replaced(tmp_path: Path) -> None:
    file, shown = token_file(tmp_path / "token", OLD_TOKEN), token_file(tmp_path / "shown", OLD_TOKEN)
    caller = identity(token_file=shown)
    async with target(settings(token_file=file)) as server:
        assert await outcome(caller.connect(server.address, "target")) == "ours"
        token_file(file, TOKEN + "and more")
        assert await outcome(caller.connect(server.address, "target")) == "UNAUTHENTICATED"
        token_file(shown, TOKEN + "and more")
        assert await outcome(caller.connect(server.address, "target")) == "ours"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"short\n", "schlüssel-schlüssel".encode(), b"\0\0bcdefghijklmnop"])
def test_what_is_no_token(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="token"):
        identity(token_file=path)


# Where strangers may call


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "worker.example"])
async def test_no_worker_listens_to_strangers_by_mistake(made: Path, tmp_path: Path, host: str) -> None:
    def make(own: TargetSettings) -> RpcServer:
        return worker_server(own, Identity.of(own, "default"), configure("test", None), callers=("router",))

    with pytest.raises(StartupError, match="set tls_cert, tls_key and tls_ca, or token_file, or insecure"):
        make(settings(host=host))
    make(settings(host=host, insecure=True))
    make(settings(made / "ours", host=host))
    make(settings(host=host, token_file=token_file(tmp_path / "token", TOKEN)))


# Clients


class Inference(inference_pb2_grpc.InferenceServicer):
    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="ours")

    def Generate(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Tokenize(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("client_ca", [False, True])
async def test_what_clients_need(made: Path, client_ca: bool) -> None:
    ours = made / "ours"
    own = RouterSettings.load(
        targets=["127.0.0.1:1"],
        tokenizer="unused",
        public_cert=ours / "router.pem",
        public_key=ours / "router-key.pem",
        **({"client_ca": ours / "ca.pem"} if client_ca else {}),
    )
    server = RpcServer("127.0.0.1:0", configure("test", None), credentials=public_credentials(own))
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, Inference())
    await server.start()

    async def model(channel: grpc.aio.Channel) -> str:
        async with channel:
            try:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                return str((await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)).model)
            except grpc.aio.AioRpcError as error:
                return error.code().name

    def by(folder: Path, client: Path | None = None) -> grpc.ChannelCredentials:
        own = (None, None) if client is None else [(client / f"client{end}.pem").read_bytes() for end in ("-key", "")]
        return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *own)

    try:
        anybody = "UNAVAILABLE" if client_ca else "ours"
        assert await model(grpc.aio.secure_channel(server.address, by(ours))) == anybody
        assert await model(grpc.aio.secure_channel(server.address, by(ours, ours))) == "ours"
        assert await model(grpc.aio.secure_channel(server.address, by(ours, made / "strangers"))) == anybody
        assert await model(grpc.aio.secure_channel(server.address, by(made / "strangers"))) == "UNAVAILABLE"
        assert await model(connect(server.address)) == "UNAVAILABLE"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "given", [{"public_cert": "a"}, {"public_key": "a"}, {"client_ca": "a"}], ids=lambda given: next(iter(given))
)
def test_public_tls_needs_all_of_its_files(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="public_cert"):
        RouterSettings.load(targets=["127.0.0.1:1"], tokenizer="unused", **given)


# The whole


async def test_a_stack_whose_every_connection_is_tls(made: Path) -> None:
    """With pools whose KV goes by gRPC. That the text is right is for other tests: here it is the same."""
    environment = {name: {"OUTRIDER_TARGET_KV_TRANSFER": "grpc"} for name in ("prefill-0", "decode-0")}
    request = inference_pb2.GenerateRequest(text="def main():\n", max_tokens=24, temperature=0.0)

    async def texts(certs: Path | None) -> tuple[str, str]:
        async with running_stack(environment, num_prefill=1, num_decode=1, certs=certs) as stack:
            plain, secret = connect(stack.router_address), None
            if certs is not None:
                secret = router_identity(certs).connect(stack.router_address, "router")
            seen = []
            for channel in (plain, secret):
                if channel is None:
                    seen.append("")
                    continue
                async with channel:
                    stub: Any = inference_pb2_grpc.InferenceStub(channel)
                    try:
                        seen.append("".join([chunk.text async for chunk in stub.Generate(request, timeout=60)]))
                    except grpc.aio.AioRpcError as error:
                        seen.append(error.code().name)
            return seen[0], seen[1]

    expected, _ = await texts(None)
    assert len(expected) > 10
    assert await texts(made / "ours") == ("UNAVAILABLE", expected)
