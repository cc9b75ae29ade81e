"""TLS of a run's servers, by certificates that its operator gives, and the authorities that its clients trust."""

import os
import socket
import ssl
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from headway.base.errors import UsageError
from headway.base.processes import is_loopback
from headway.config.shared import TlsSettings

CA_FILE = "HEADWAY_CA_FILE"
"""Set to the certificate of the authority that signed the run's own, where that is not a public one."""

NAME = "HEADWAY_TLS_NAME"
"""Set to the name that all certificates of the run hold, where they cannot hold the addresses of its hosts, as those of
pods, which nobody knows before they start."""


def server_context(settings: TlsSettings, host: str) -> ssl.SSLContext | None:
    """Return what a server at `host` answers with; None for plain HTTP: without a certificate, and on loopback, which
    no other host reaches. Raises UsageError where certificate and key cannot be used."""
    certificate, key = settings.certificate, settings.key
    if certificate is None or key is None or is_loopback(host):
        return None
    try:
        if key.stat().st_mode & 0o077:
            raise UsageError(f"tls.key {key} can be read by others: chmod 600 {key}")
        certificate.stat()
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot read it for TLS: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password for a key that has one, the command would stop to ask for it.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"tls.certificate {certificate} and tls.key {key} are no pair of PEM files without a password: {error}"
        ) from None
    return context


def client_context() -> ssl.SSLContext:
    """Return what clients trust: public authorities, and the one that HEADWAY_CA_FILE names. A host that is called by
    its address may show a certificate for the name in HEADWAY_TLS_NAME instead. Raises UsageError."""
    return _trusting(os.environ.get(CA_FILE), os.environ.get(NAME))


def scheme(context: ssl.SSLContext | None) -> str:
    return "http" if context is None else "https"


class _NamingContext(ssl.SSLContext):
    """Asks of a host that is called by its address for a certificate of one name. Other names stand for themselves."""

    name: str

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        name = self._expected(server_hostname)
        return super().wrap_socket(
            sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, server_hostname=name, session=session
        )

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self._expected(server_hostname), session)

    def _expected(self, host: str | bytes | None) -> str | bytes | None:
        try:
            ip_address(host.decode() if isinstance(host, bytes) else host or "")
        except ValueError:
            return host
        return self.name


@cache
def _trusting(authority: str | None, name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if name:
        context = _NamingContext(ssl.PROTOCOL_TLS_CLIENT)
        context.name = name
        context.load_default_certs()
    if authority:
        try:
            context.load_verify_locations(Path(authority))
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"{CA_FILE} {authority} is no PEM file of certificates: {error}") from None
    return context
