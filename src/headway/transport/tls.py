"""TLS of a run's servers, by certificates that its operator gives, and the authorities that its clients trust."""

import os
import ssl
from functools import cache
from pathlib import Path

from headway.config.shared import TlsSettings
from headway.core.errors import UsageError
from headway.core.processes import is_loopback

CA_FILE = "HEADWAY_CA_FILE"
"""Set to the certificate of the authority that signed the run's own, where that is not a public one."""


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
    """Return what clients trust: public authorities, and the one that HEADWAY_CA_FILE names. Raises UsageError."""
    return _trusting(os.environ.get(CA_FILE))


def scheme(context: ssl.SSLContext | None) -> str:
    return "http" if context is None else "https"


@cache
def _trusting(authority: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if authority:
        try:
            context.load_verify_locations(Path(authority))
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"{CA_FILE} {authority} is no PEM file of certificates: {error}") from None
    return context
