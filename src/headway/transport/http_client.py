"""A small blocking HTTP client with the run's token, for processes without an event loop."""

import http.client
import ssl
import threading
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.transport.tls import CA_FILE, client_context


class UnreachableError(HeadwayError):
    """No answer came; another attempt may succeed."""


class AnswerError(HeadwayError):
    """The service answered with a failure."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Requests to one server, over a connection that is kept. Threads take turns."""

    def __init__(self, url: str, token: str | None, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/"):
            raise UsageError(f"{url!r} is not the address of a run: http://HOST:PORT, as `headway rl` prints it")
        self.url, self.host = f"{parts.scheme}://{parts.netloc}", host
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=client_context())
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout)

    def request(self, method: str, route: str, body: bytes | None = None, span: tuple[int, int] | None = None) -> bytes:
        """Return the body of the answer; of a file, the bytes from `span[0]` to before `span[1]` where it is given.

        Raises UnreachableError, AnswerError for any status but 200 and 206, and UsageError for a server that this
        client must not trust with the token.
        """
        headers = self._headers | ({"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {})
        with self._lock:
            status, content = self._try(method, route, body, headers)
        if status not in (200, 206):
            raise AnswerError(status, _message(content, status))
        return content

    def _try(self, method: str, route: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        # A kept connection may have been closed by the server meanwhile: all requests may be sent twice.
        for attempt in (1, 2):
            try:
                self._connection.request(method, route, body, headers)
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except ssl.SSLCertVerificationError as error:
                self._connection.close()
                why = error.verify_message.rstrip(".")
                raise UsageError(
                    f"{self.url} has a certificate that is not trusted here ({why}): it must hold this address, and "
                    f"{CA_FILE} must name the authority that signed it"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if attempt == 2:
                    raise UnreachableError(f"no answer from {self.url}: {_reason(error, self.url)}") from None
        raise AssertionError("unreachable")

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def check_trusted(url: str) -> None:
    """Raise UsageError where clients would refuse the certificate of our own server at `url`."""
    client = HttpClient(url, None)
    with suppress(AnswerError):
        client.request("GET", "/")
    client.close()


def _reason(error: Exception, url: str) -> str:
    """Say why no answer came; a server that speaks TLS only resets those who do not, and the other way round."""
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error}; does it speak TLS?"
    if url.startswith("http:") and isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return f"{error}; perhaps it speaks TLS, and its address begins with https"
    return str(error) or type(error).__name__


def _message(content: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(content, type=dict[str, str])["error"])
    except (msgspec.DecodeError, KeyError):
        return f"status {status}"
