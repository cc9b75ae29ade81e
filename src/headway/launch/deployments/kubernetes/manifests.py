"""The objects of a run on Kubernetes, as plain data: settings, service, claims, and the workloads of head, trainer and
engines.

The head is the orchestrator with the run's control service. A Service gives it a name that stays; all else finds each
other by pod addresses that they announce there.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from headway.base.errors import UsageError
from headway.config.deployment import NodeSettings
from headway.config.rl import RlSettings
from headway.launch.deployments.kubernetes.pods import Pod, run_folder
from headway.launch.deployments.roles import role_commands

Manifest = dict[str, Any]

DEFAULT_PORT = 8500
ENGINE_PORT = 8000
"""Port of a node's first engine; the others follow."""
RETRIES = 20
"""Pods that may fail, one after another, before their role is given up."""
_CLEAN_UP_SECONDS = 60


def object_name(settings: RlSettings) -> str:
    """Return the name of the run's objects. Raises UsageError where the run's is not one that Kubernetes takes."""
    name = settings.run.name or ""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
        raise UsageError(
            "on Kubernetes a run's name is up to 32 small letters, digits and dashes between them; give it such a "
            f"--run.name (got {name!r})"
        )
    return f"headway-{name}"


def secret(settings: RlSettings, token: str) -> Manifest:
    return _object(settings, "v1", "Secret", type="Opaque", stringData={"token": token})


def run_objects(settings: RlSettings, toml: str, port: int) -> list[Manifest]:
    """Return all objects but the token's, in the order in which to make them. `toml` is what the head reads.

    Raises UsageError where nodes, ranks or names do not fit.
    """
    cluster = settings.deployment.kubernetes
    if settings.tls.certificate is not None:
        raise UsageError(
            "files of this machine are not in pods; put certificate and key into a Secret, and name it in "
            "deployment.kubernetes.tls_secret"
        )
    ports = [{"name": "control", "port": port, "targetPort": port}]
    selector = {**_labels(settings), "app.kubernetes.io/component": "head"}
    objects = [
        _object(settings, "v1", "ConfigMap", data={"rl.toml": toml}),
        _object(settings, "v1", "Service", spec={"selector": selector, "ports": ports}),
        *_claims(settings),
    ]
    head, trainer, engine = _pods(settings, port)
    if cluster.form == "jobset":
        return [*objects, _jobset(settings, head, trainer, engine)]
    if cluster.form == "leaderworkerset":
        job = _job(settings, head, 1)
        job["spec"]["ttlSecondsAfterFinished"] = _CLEAN_UP_SECONDS  # which takes the sets along: they are its own
        sets = [
            _leader_worker_set(settings, trainer, groups=1, size=settings.deployment.trainer.nodes),
            _leader_worker_set(settings, engine, groups=settings.deployment.inference.nodes, size=1),
        ]
        return [*objects, job, *sets]
    return [
        *objects,
        _job(settings, head, 1),
        _job(settings, trainer, settings.deployment.trainer.nodes),
        _job(settings, engine, settings.deployment.inference.nodes),
    ]


def _pods(settings: RlSettings, port: int) -> tuple[Pod, Pod, Pod]:
    """Describe the pods of the three roles."""
    deployment, name = settings.deployment, object_name(settings)
    commands = role_commands(
        settings,
        deployment.python or "python",
        folder=run_folder(deployment),
        engine=f"--inference.port {ENGINE_PORT}",
    )
    claim = deployment.kubernetes.claim
    scheme = {} if deployment.kubernetes.tls_secret is None else {"scheme": "HTTPS"}
    health = {"httpGet": {"path": "/health", "port": ENGINE_PORT, **scheme}}
    pod = partial(Pod, name=name, port=port, deployment=deployment)
    return (
        pod("head", commands.head, NodeSettings(), claim or f"{name}-head", {"tcpSocket": {"port": port}}),
        pod("trainer", commands.trainer, deployment.trainer, claim or f"{name}-trainer", None),
        pod("engine", commands.engine, deployment.inference, claim, health),
    )


def _claims(settings: RlSettings) -> Iterator[Manifest]:
    """Make the storage of head and trainer, whose folders a run continues from."""
    deployment = settings.deployment
    if deployment.kubernetes.claim is not None:
        return
    if deployment.trainer.nodes > 1:
        raise UsageError(
            "the pods of a trainer of several nodes need a folder to continue from; name storage that all pods mount, "
            "deployment.kubernetes.claim"
        )
    for role in ("head", "trainer"):
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": deployment.kubernetes.storage}},
        }
        yield _object(settings, "v1", "PersistentVolumeClaim", role, spec=spec)


def _job(settings: RlSettings, pod: Pod, nodes: int) -> Manifest:
    return _object(settings, "batch/v1", "Job", pod.role, spec=_job_spec(settings, pod, nodes))


def _job_spec(settings: RlSettings, pod: Pod, nodes: int) -> Manifest:
    """Describe pods that are replaced until each has done its work. Evictions do not count as failures, and settings
    that a role refuses are not tried again."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [UsageError.exit_code]}},
    ]
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": RETRIES,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # two trainers would write one folder
        "template": {"metadata": {"labels": _labels(settings, pod.role)}, "spec": pod.spec("Never")},
    }


def _jobset(settings: RlSettings, head: Pod, trainer: Pod, engine: Pod) -> Manifest:
    """One JobSet that has succeeded when its head has; a role that fails for good starts all again."""
    deployment = settings.deployment
    nodes = ((head, 1), (trainer, deployment.trainer.nodes), (engine, deployment.inference.nodes))
    jobs = [
        {"name": pod.role, "replicas": 1, "template": {"spec": _job_spec(settings, pod, count)}} for pod, count in nodes
    ]
    spec = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
        "failurePolicy": {"maxRestarts": RETRIES},
        "replicatedJobs": jobs,
    }
    return _object(settings, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)


def _leader_worker_set(settings: RlSettings, pod: Pod, *, groups: int, size: int) -> Manifest:
    """A set of groups of pods. Ranks of several nodes start together again when one of them does."""
    template = {"metadata": {"labels": _labels(settings, pod.role)}, "spec": pod.spec("Always")}
    spec = {
        "replicas": groups,
        "leaderWorkerTemplate": {
            "size": size,
            "restartPolicy": "RecreateGroupOnPodRestart" if size > 1 else "None",
            "workerTemplate": template,
        },
    }
    return _object(settings, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", pod.role, spec=spec)


def _object(settings: RlSettings, version: str, kind: str, role: str = "", **fields: Any) -> Manifest:
    name = f"{object_name(settings)}-{role}" if role else object_name(settings)
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": _labels(settings, role)},
        **fields,
    }


def _labels(settings: RlSettings, role: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "headway", "app.kubernetes.io/instance": object_name(settings)}
    return {**labels, "app.kubernetes.io/component": role} if role else labels
