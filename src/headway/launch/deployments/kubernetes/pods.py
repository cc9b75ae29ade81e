"""One pod of a role: its container, what it mounts, what it is given, and how it is looked after."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.base.errors import STOPPED
from headway.config.deployment import DeploymentSettings, NodeSettings
from headway.config.shared import TlsSettings
from headway.transport.control.tokens import TOKEN
from headway.transport.tls import CA_FILE, NAME

USER = 1000
"""The user of the containers, as in the `Containerfile`."""
_SETTINGS_FOLDER = "/etc/headway"
_TLS_FOLDER = "/etc/headway-tls"
POD_TLS = TlsSettings(certificate=Path(f"{_TLS_FOLDER}/tls.crt"), key=Path("/tmp/headway-tls.key"))
"""Certificate and key in a pod whose deployment names a Secret of them."""
# Files of a Secret belong to root, and a group that may read them: the key has to be the user's alone.
_TAKE_KEY = f"(umask 077 && cp {_TLS_FOLDER}/tls.key {POD_TLS.key}) || exit"
_SCRIPT = """\
{take_key}
{setup}
asked=
trap 'asked=1; woken=1; kill -{signal} $! 2>/dev/null' TERM
({command}) &
[ -z "$asked" ] || kill -{signal} $!
# A signal ends a wait early, with a code of its own. The next one has the role's, and 127 if that was told already.
code=127
while :; do
  woken=
  wait $!
  status=$?
  [ "$status" = 127 ] || code=$status
  [ -n "$woken" ] || break
done
# Stopped, and not by a signal to this pod: the run was asked to stop, and no other pod should go on.
if [ "$code" = {stopped} ] && [ -z "$asked" ]; then code=0; fi
exit "$code"
"""


def run_folder(deployment: DeploymentSettings) -> str:
    """Return the folder of a pod's volume."""
    return deployment.folder if deployment.folder.startswith("/") else "/outputs"


@dataclass(frozen=True)
class Pod:
    """A pod of a role. `claim` is its storage, or None for a folder that goes with it; `alive` is a probe."""

    role: str
    command: str
    node: NodeSettings
    claim: str | None
    alive: dict[str, Any] | None
    name: str
    port: int
    deployment: DeploymentSettings

    def spec(self, restart: str) -> dict[str, Any]:
        """Return the pod's description. `restart` is its restart policy."""
        selector = self.deployment.kubernetes.node_selector
        return {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": self.deployment.grace_seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"nodeSelector": selector} if selector and self.role != "head" else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container()],
            "volumes": self._volumes(),
        }

    def _container(self) -> dict[str, Any]:
        # A head that is told to end would end the run for all; one that is gone is waited for.
        signal = "KILL" if self.role == "head" else "TERM"
        script = _SCRIPT.format(
            take_key=_TAKE_KEY if self._tls_secret else "",
            setup=self.deployment.setup,
            command=self.command,
            stopped=STOPPED,
            signal=signal,
        ).lstrip()
        mounts = [
            {"name": "run", "mountPath": run_folder(self.deployment)},
            {"name": "settings", "mountPath": _SETTINGS_FOLDER, "readOnly": True},
            *([{"name": "tls", "mountPath": _TLS_FOLDER, "readOnly": True}] if self._tls_secret else []),
            *([{"name": "shared-memory", "mountPath": "/dev/shm"}] if self.node.gpus else []),
        ]
        return {
            "name": self.role,
            "image": self.deployment.kubernetes.image,
            "command": ["sh", "-c", script],
            "env": self._environment(),
            "resources": self._resources(),
            "volumeMounts": mounts,
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            **self._probes(),
        }

    def _environment(self) -> list[dict[str, Any]]:
        values = {
            "HEADWAY_RUN": self.name.removeprefix("headway-"),
            "HEADWAY_SETTINGS": f"{_SETTINGS_FOLDER}/rl.toml",
            "HEADWAY_PORT": str(self.port),
            "HEADWAY_URL": f"{'https' if self._tls_secret else 'http'}://{self.name}:{self.port}",
            **({CA_FILE: f"{_TLS_FOLDER}/ca.crt", NAME: self.name} if self._tls_secret else {}),
            **self.deployment.environment,
        }
        fields = {"HEADWAY_HOST": "status.podIP", "HEADWAY_NODE": "metadata.name"}
        return [
            *({"name": key, "value": value} for key, value in values.items()),
            *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()),
            {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": self.name, "key": "token"}}},
        ]

    def _resources(self) -> dict[str, Any]:
        """Ask for what the settings say. GPUs and memory are limits, too; cores are not, so that none lies idle."""
        cores = {"cpu": f"{self.node.cpus:g}"} if self.node.cpus else {}
        memory = {"memory": self.node.memory} if self.node.memory else {}
        gpus = {"nvidia.com/gpu": str(self.node.gpus)} if self.node.gpus else {}
        asked = {"requests": {**cores, **memory}, "limits": {**memory, **gpus}}
        return {kind: values for kind, values in asked.items() if values}

    def _probes(self) -> dict[str, Any]:
        """Wait half an hour for the start, which may load a large model, and five minutes for one that hangs."""
        if self.alive is None:
            return {}
        return {
            "startupProbe": {**self.alive, "periodSeconds": 5, "failureThreshold": 360},
            "readinessProbe": {**self.alive, "periodSeconds": 5},
            "livenessProbe": {**self.alive, "periodSeconds": 10, "failureThreshold": 30, "timeoutSeconds": 5},
        }

    def _volumes(self) -> list[dict[str, Any]]:
        storage = {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        return [
            {"name": "run", **storage},
            {"name": "settings", "configMap": {"name": self.name}},
            *([{"name": "tls", "secret": {"secretName": self._tls_secret}}] if self._tls_secret else []),
            *([shared_memory] if self.node.gpus else []),
        ]

    @property
    def _tls_secret(self) -> str | None:
        return self.deployment.kubernetes.tls_secret
