"""TLS by given certificates: who is trusted, and what a user is told where something is wrong."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from control_helpers import TOKEN

from headway.base.errors import UsageError
from headway.cli import main
from headway.config.shared import HttpWeights, TlsSettings
from headway.core.runs import RunPaths
from headway.transport import tls
from headway.transport.control.client import ControlClient
from headway.transport.http_client import HttpClient, UnreachableError, check_trusted
from headway.transport.http_thread import HttpThread
from headway.transport.weights import make_sender
from namespaces import Host, make_certificates


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    return make_certificates(folder, [Host("here", "127.0.0.1", ""), Host("elsewhere", "10.9.9.9", "")])


def certified(authority: Path, host: str = "here") -> TlsSettings:
    return TlsSettings(certificate=authority.with_name(f"{host}.pem"), key=authority.with_name(f"{host}.key"))


def serve(settings: TlsSettings) -> HttpThread:
    return HttpThread(web.Application(), "127.0.0.1", 0, "test", tls.server_context(settings, "10.0.0.1"))


@pytest.fixture
def server(authority: Path) -> Iterator[HttpThread]:
    thread = serve(certified(authority))
    yield thread
    thread.close()


def test_who_knows_the_authority_trusts_a_server_and_others_are_told(
    server: HttpThread, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://127.0.0.1:{server.port}"
    monkeypatch.delenv(tls.CA_FILE, raising=False)
    with pytest.raises(UsageError, match=r"not trusted here .*HEADWAY_CA_FILE must name the authority"):
        ControlClient(url, TOKEN).wait()
    with pytest.raises(UnreachableError, match="perhaps it speaks TLS, and its address begins with https"):
        HttpClient(url.replace("https", "http"), TOKEN).request("GET", "/")
    monkeypatch.setenv(tls.CA_FILE, str(authority))
    check_trusted(url)
    other = serve(certified(authority, "elsewhere"))
    with pytest.raises(UsageError, match=r"IP address mismatch.*must hold this address"):
        check_trusted(f"https://127.0.0.1:{other.port}")
    other.close()
    monkeypatch.setenv(tls.CA_FILE, str(authority.with_name("none.pem")))
    with pytest.raises(UsageError, match=r"none\.pem is no PEM file"):
        check_trusted(url)


def test_a_host_called_by_its_address_may_show_the_name_of_the_run(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do, whose addresses no certificate holds; with blocking clients and with those of an event loop."""
    named = make_certificates(authority.with_name("of-pods"), [Host("pod", "10.9.9.9", "")], name="headway-run")
    server = serve(certified(named, "pod"))
    url = f"https://127.0.0.1:{server.port}"
    monkeypatch.setenv(tls.CA_FILE, str(named))

    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.get(url, ssl=tls.client_context()) as answer:
            return answer.status

    with pytest.raises(UsageError, match="IP address mismatch"):
        check_trusted(url)
    monkeypatch.setenv(tls.NAME, "headway-another")
    with pytest.raises(UsageError, match="Hostname mismatch"):
        check_trusted(url)
    monkeypatch.setenv(tls.NAME, "headway-run")
    check_trusted(url)
    assert asyncio.run(ask()) == 404
    with pytest.raises(UsageError, match="Hostname mismatch"):
        check_trusted(url.replace("127.0.0.1", "localhost"))
    server.close()


def test_a_server_without_tls_is_not_taken_for_one(authority: Path) -> None:
    plain = HttpThread(web.Application(), "127.0.0.1", 0, "test")
    with pytest.raises(UnreachableError, match=r"does it speak TLS\?"):
        HttpClient(f"https://127.0.0.1:{plain.port}", TOKEN).request("GET", "/")
    plain.close()


def test_certificates_that_cannot_be_used_are_refused(authority: Path, tmp_path: Path) -> None:
    assert tls.server_context(TlsSettings(), "10.0.0.1") is None
    assert tls.server_context(certified(authority), "127.0.0.1") is None, "no other host reaches it"
    key = tmp_path / "open.key"
    key.write_bytes(authority.with_name("here.key").read_bytes())
    key.chmod(0o644)
    certificate = authority.with_name("here.pem")
    for settings, reason in (
        (TlsSettings(certificate=certificate, key=key), r"can be read by others: chmod 600"),
        (TlsSettings(certificate=certificate, key=tmp_path / "none.key"), r"none\.key: cannot read it for TLS"),
        (TlsSettings(certificate=certificate, key=authority.with_name("elsewhere.key")), r"no pair of PEM files"),
    ):
        with pytest.raises(UsageError, match=reason):
            tls.server_context(settings, "10.0.0.1")


def test_half_a_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", "tiny", "--tls.certificate", "host.pem"]) == 2
    assert "tls.key is missing: TLS needs a certificate and its key" in capsys.readouterr().err


def test_weights_are_served_with_the_certificate(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At loopback, which stands for an address here that others reach."""
    monkeypatch.setattr(tls, "is_loopback", lambda host: False)
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)
    monkeypatch.setenv(tls.CA_FILE, str(authority))
    sender = make_sender(HttpWeights(), RunPaths(tmp_path), tls=certified(authority))
    update = sender.publish(1, {}.items())
    assert update.transport["urls"][0].startswith("https://127.0.0.1:")
    sender.close()
    with pytest.raises(UsageError, match="IP address mismatch"):
        make_sender(HttpWeights(), RunPaths(tmp_path), tls=certified(authority, "elsewhere"))
