"""A Kubernetes cluster, by its official client: makes the objects of a run, reads its pods and logs, and ends it."""

import time
from collections.abc import Sequence
from typing import Any

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command
from headway.launch.deployments.kubernetes.manifests import Manifest

WORKLOADS = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
_KEPT = ("Secret", "PersistentVolumeClaim")
"""Objects that stay as they are when a run is started again."""
_GONE_SECONDS = 60.0


class Cluster:
    """The cluster of the current context, or the one that this process runs in."""

    def __init__(self, namespace: str | None) -> None:
        """Connect. Raises UsageError without the client or a configuration, HeadwayError where nobody answers."""
        try:
            from kubernetes import client, config, dynamic
        except ImportError:
            raise UsageError(f"deployment.type kubernetes needs its client: {install_command('kubernetes')}") from None
        try:
            config.load_config()
        except config.ConfigException as error:
            raise UsageError(f"no Kubernetes cluster is configured here ({error}); see `kubectl config view`") from None
        self.namespace = namespace or _context_namespace(config)
        self.core = client.CoreV1Api()
        self._error = client.exceptions.ApiException
        try:
            self._dynamic = dynamic.DynamicClient(client.ApiClient())
        except Exception as error:  # what a connection raises is not of one kind
            raise HeadwayError(f"the Kubernetes cluster does not answer: {error}") from None

    def apply(self, objects: Sequence[Manifest]) -> None:
        """Make objects in this order. LeaderWorkerSets belong to the Job before them, and go when it goes.

        Raises UsageError where the run is there already, HeadwayError where the cluster refuses one.
        """
        self._refuse_running(objects[0]["metadata"]["labels"]["app.kubernetes.io/instance"])
        owner: list[dict[str, Any]] = []
        for body in objects:
            if body["kind"] == "LeaderWorkerSet":
                body = {**body, "metadata": {**body["metadata"], "ownerReferences": owner}}
            made = self._make(body)
            if body["kind"] == "Job":
                identity = {"apiVersion": "batch/v1", "kind": "Job", "name": made.metadata.name}
                owner = [{**identity, "uid": made.metadata.uid}]

    def pods(self, name: str) -> list[Any]:
        """Return the pods of a run, oldest first."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=_selector(name)).items
        return sorted(found, key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name))

    def log(self, pod: str, lines: int) -> list[str]:
        """Return the last lines that a pod wrote; none where it has not started or is gone."""
        try:
            return str(self.core.read_namespaced_pod_log(pod, self.namespace, tail_lines=lines)).splitlines()
        except self._error as error:
            if error.status in (400, 404):
                return []
            raise HeadwayError(f"the cluster has no log of {pod}: {error.reason}") from None

    def remove_workloads(self, name: str, *, wait: bool = False) -> None:
        """Remove all that runs, so that pods are told to end; settings, token and storage stay."""
        for kind, version in WORKLOADS.items():
            if (resource := self._resource(version, kind)) is None:
                continue
            for item in resource.get(namespace=self.namespace, label_selector=_selector(name)).items:
                resource.delete(
                    name=item.metadata.name, namespace=self.namespace, body={"propagationPolicy": "Foreground"}
                )
        deadline = time.monotonic() + _GONE_SECONDS
        while wait and self._workloads(name):
            if time.monotonic() > deadline:
                raise HeadwayError(f"{name} is still being removed; try again when `headway status` shows no pods")
            time.sleep(0.2)

    def _refuse_running(self, name: str) -> None:
        """Clear away what ended, so that a run can be started again. Raises UsageError where it still runs."""
        alive = [pod for pod in self.pods(name) if pod.status.phase in ("Pending", "Running")]
        if alive:
            raise UsageError(f"{name} has {len(alive)} pods in namespace {self.namespace}; stop that run first")
        self.remove_workloads(name, wait=True)

    def _workloads(self, name: str) -> list[Any]:
        found = []
        for kind, version in WORKLOADS.items():
            if (resource := self._resource(version, kind)) is not None:
                found += resource.get(namespace=self.namespace, label_selector=_selector(name)).items
        return found

    def _make(self, body: Manifest) -> Any:
        kind, name = body["kind"], body["metadata"]["name"]
        resource = self._resource(body["apiVersion"], kind)
        if resource is None:
            raise UsageError(f"this cluster knows no {kind}: install its controller, or choose another form")
        try:
            return resource.create(body=body, namespace=self.namespace)
        except self._error as error:
            if error.status != 409:
                raise HeadwayError(f"the cluster refused {kind} {name}: {error.summary()}") from None
        if kind in _KEPT:
            return resource.get(name=name, namespace=self.namespace)
        return resource.patch(body=body, namespace=self.namespace, content_type="application/merge-patch+json")

    def _resource(self, version: str, kind: str) -> Any:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            return self._dynamic.resources.get(api_version=version, kind=kind)
        except ResourceNotFoundError:
            return None


class KubernetesRun:
    """A run in a cluster, as `headway status`, `logs` and `stop` see it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def describe(self) -> list[str]:
        lines = [self._describe(pod) for pod in self._cluster.pods(self._name)]
        return lines or [f"no pods of {self._name} in namespace {self._cluster.namespace}"]

    def logs(self, process: str, lines: int) -> dict[str, Sequence[str]]:
        pods = [pod for pod in self._cluster.pods(self._name) if _role(pod).startswith(process)]
        return {pod.metadata.name: self._cluster.log(pod.metadata.name, lines) for pod in pods}

    def stop(self) -> None:
        self._cluster.remove_workloads(self._name)

    def _describe(self, pod: Any) -> str:
        node = f" on {pod.spec.node_name}" if pod.spec.node_name else ""
        leaving = ", leaving" if pod.metadata.deletion_timestamp else ""
        said = self._cluster.log(pod.metadata.name, 1)
        return f"{pod.metadata.name}{node}: {pod.status.phase}{leaving}" + (f"; {said[-1].strip()}" if said else "")


def _role(pod: Any) -> str:
    return str(pod.metadata.labels.get("app.kubernetes.io/component", ""))


def _selector(name: str) -> str:
    return f"app.kubernetes.io/instance={name}"


def _context_namespace(config: Any) -> str:
    try:
        return str(config.list_kube_config_contexts()[1]["context"].get("namespace") or "default")
    except config.ConfigException:  # in a pod
        return "default"
