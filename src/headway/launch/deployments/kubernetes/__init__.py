"""Kubernetes: a run as pods, described in Python and given to the cluster by its official client."""

import json
from pathlib import Path
from typing import Any

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.base.files import write_atomic
from headway.config.rl import RlSettings
from headway.config.toml import to_toml
from headway.core.runs import RunPaths
from headway.launch.deployments.kubernetes.cluster import Cluster, KubernetesRun
from headway.launch.deployments.kubernetes.manifests import DEFAULT_PORT, object_name, run_objects, secret
from headway.launch.deployments.kubernetes.pods import POD_TLS
from headway.transport.control.tokens import find_token, write_token
from headway.transport.tls import NAME

_RECORD = "kubernetes.json"
_NO_SECRET = """\
# The token is a Secret of its own, which `headway rl` makes when it starts the run. To apply these by hand, make it
# first:
#   kubectl create secret generic {name} --from-file=token=FILE
"""


def preview(settings: RlSettings, port: int | None) -> str:
    name = object_name(settings)
    objects = run_objects(settings, _settings_in_pods(settings), port or DEFAULT_PORT)
    return _NO_SECRET.format(name=name) + to_yaml(objects)


def launch(settings: RlSettings, paths: RunPaths, port: int | None) -> bool:
    """Make the objects. The token stays in the run's folder here, and goes to the pods as a Secret."""
    cluster = Cluster(settings.deployment.kubernetes.namespace)
    write_token(paths)
    token = find_token(paths)
    assert token is not None
    name = object_name(settings)
    objects = run_objects(settings, _settings_in_pods(settings), port or DEFAULT_PORT)
    cluster.apply([secret(settings, token), *objects])
    write_atomic(paths.control / _RECORD, json.dumps({"namespace": cluster.namespace, "name": name}))
    print(f"{len(objects)} objects in namespace {cluster.namespace}: see `headway status {paths.root}`")
    encrypted = settings.deployment.kubernetes.tls_secret is not None
    scheme, trust = ("https", f", HEADWAY_CA_FILE of its authority and {NAME}={name}") if encrypted else ("http", "")
    print(f"its address is {scheme}://{name}:{port or DEFAULT_PORT} in the cluster; from here, after")
    print(f"  kubectl --namespace {cluster.namespace} port-forward service/{name} {port or DEFAULT_PORT}")
    print(f"{scheme}://127.0.0.1:{port or DEFAULT_PORT}, with HEADWAY_TOKEN_FILE={paths.control / 'token'}{trust}")
    return True


def _settings_in_pods(settings: RlSettings) -> str:
    """Write the settings as all pods read them, with the files of their certificate where they have one."""
    if settings.deployment.kubernetes.tls_secret is not None:
        settings = settings.model_copy(update={"tls": POD_TLS})
    return to_toml(settings)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Write objects as YAML, with texts of several lines as blocks. Raises UsageError without the extra."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"deployment.type kubernetes needs its client: {install_command('kubernetes')}") from None

    def represent_text(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, represent_text)
    return str(yaml.dump_all(objects, Dumper=dumper, sort_keys=False, explicit_start=True, width=120))


def find_deployed(where: str) -> KubernetesRun | None:
    """Return the run in a cluster that a run folder tells of; None for other folders and for addresses."""
    file = RunPaths(Path(where)).control / _RECORD
    if not file.is_file():
        return None
    record = json.loads(file.read_text())
    return KubernetesRun(Cluster(record["namespace"]), record["name"])
