"""Prometheus: metrics as its text format, and a small endpoint for processes that have no server of their own."""

import math
import re
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headway.base.addresses import cannot_listen

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(values: Mapping[str, float], labels: Mapping[str, str] = {}, prefix: str = "headway") -> str:
    """Values in Prometheus' text format; see `render_all`."""
    return render_all([(labels, values)], prefix)


def render_all(groups: Iterable[tuple[Mapping[str, str], Mapping[str, float]]], prefix: str = "headway") -> str:
    """Groups of values, each with its labels, in Prometheus' text format.

    A name that ends in `_total` is a counter, every other a gauge. Signs that Prometheus has no place for in names
    become underscores: `loss/rl` is `headway_loss_rl`. Of names of a group that become equal the last one stays.
    """
    samples: dict[str, dict[str, float]] = {}
    for labels, values in groups:
        for name, value in values.items():
            samples.setdefault(metric_name(name, prefix), {})[_labels(labels)] = value
    lines = []
    for name, by_label in samples.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f"{name}{labels} {_number(value)}" for labels, value in by_label.items()]
    return "".join(f"{line}\n" for line in lines)


def metric_name(name: str, prefix: str = "headway") -> str:
    return re.sub(r"[^a-zA-Z0-9_:]", "_", f"{prefix}_{name}" if prefix else name)


class PrometheusExporter:
    """Answers `GET /metrics` with the latest values of each process; on loopback, unless it is told another address."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self._values: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self))
        except OSError as error:
            remedy = "choose another tracking.prometheus_port, or 0 for any free one"
            raise cannot_listen(host, port, error, remedy) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}/metrics"

    def update(self, process: str, values: Mapping[str, float]) -> None:
        with self._lock:
            self._values.setdefault(process, {}).update(values)

    def text(self) -> str:
        with self._lock:
            return render_all(({"process": process}, values) for process, values in self._values.items())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrometheusSink(PrometheusExporter):
    """The exporter of one process that runs by itself."""

    def __init__(self, process: str, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(port, host)
        self._process = process

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.update(self._process, {"step": float(step), **values})


def _handler(sink: PrometheusExporter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = sink.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line."""

    return Handler


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
