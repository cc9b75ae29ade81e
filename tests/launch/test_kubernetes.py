"""A run on Kubernetes: its objects pass the strict schemas of the versions in use, and hold together."""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from headway.base.errors import UsageError
from headway.cli import main
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.launch.deployments.kubernetes import preview, to_yaml
from headway.launch.deployments.kubernetes.manifests import run_objects, secret

VERSIONS = ("1.35.0", "1.36.0", "1.37.0")
"""Versions of Kubernetes whose schemas are checked: those that are maintained."""
SEVERAL = ("--deployment.trainer.nodes", "2", "--deployment.trainer.processes", "8", "--placement.trainer_ranks", "16")
GPUS = ("--deployment.trainer.gpus", "8", "--deployment.inference.gpus", "4", "--deployment.inference.nodes", "3")
TLS = ("--deployment.kubernetes.tls_secret", "certificates")
FORMS = ("jobs", "jobset", "leaderworkerset")


def settings(*flags: str) -> RlSettings:
    return load_settings(RlSettings, ["--run.name", "run", "--deployment.type", "kubernetes", *flags]).settings


def objects(*flags: str, port: int = 8500) -> list[dict[str, Any]]:
    return run_objects(settings(*flags), 'max_steps = 3\n\n[run]\nname = "run"\n', port)


def found(made: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    [body] = [body for body in made if body["kind"] == kind and body["metadata"]["name"].endswith(name)]
    return body


def job_specs(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Jobs inside of an object."""
    if body["kind"] == "Job":
        yield body["spec"]
    if body["kind"] == "JobSet":
        yield from (job["template"]["spec"] for job in body["spec"]["replicatedJobs"])


def pod_specs(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods inside of an object."""
    yield from (job["template"]["spec"] for job in job_specs(body))
    if body["kind"] == "LeaderWorkerSet":
        yield body["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]


@cache
def definitions(version: str) -> "Registry[Any]":
    return (Resource.from_contents(strict_schema(version, "_definitions")) @ Registry()).crawl()


@cache
def validator_of(version: str, name: str) -> Draft202012Validator:
    schema = strict_schema(version, name)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ definitions(version))


def strict_schema(version: str, name: str) -> Any:
    """A schema of Kubernetes in which unknown fields are errors. They come with a package, so that no network is
    needed; that one reads all of them again for each object, so that they are kept here."""
    return schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)


def validator(version: str, body: dict[str, Any]) -> Draft202012Validator:
    return validator_of(version, f"{body['kind'].lower()}-{body['apiVersion'].replace('/', '-')}")


def check(body: dict[str, Any], version: str) -> None:
    """Check an object against the schemas of a version, with unknown fields refused.

    Those of JobSet are the classes that Kubeflow's trainer makes of its definition; no package holds that of
    LeaderWorkerSet, so that of its own fields only the names are checked here, and its pods as pods.
    """
    if body["kind"] == "JobSet":
        # Takes seconds to import, which a worker that runs other files need not spend.
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec import JobsetV1alpha2JobSetSpec

        as_read = JobsetV1alpha2JobSetSpec.from_dict(body["spec"])
        assert as_read is not None
        assert without_none(as_read.to_dict()).keys() == body["spec"].keys()
        for job in body["spec"]["replicatedJobs"]:
            assert job.keys() == {"name", "replicas", "template"} and job["template"].keys() == {"spec"}
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
            validator(version, whole).validate(whole)
        for part in ("successPolicy", "failurePolicy"):
            assert without_none(as_read.to_dict())[part] == body["spec"][part]
    elif body["kind"] == "LeaderWorkerSet":
        template = body["spec"]["leaderWorkerTemplate"]
        assert body["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
        assert template.keys() == {"size", "restartPolicy", "workerTemplate"}
        assert template["restartPolicy"] in ("RecreateGroupOnPodRestart", "None")
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"},
            "spec": template["workerTemplate"]["spec"],
        }
        validator(version, pod).validate(pod)
    else:
        validator(version, body).validate(body)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_of_all_forms_pass_the_strict_schemas(version: str) -> None:
    for form in FORMS:
        form_flags = ("--deployment.kubernetes.form", form, "--deployment.inference.memory", "64Gi")
        claim = ("--deployment.kubernetes.claim", "shared")
        for flags in ((), (*GPUS, *TLS, "--deployment.trainer.cpus", "16"), (*SEVERAL, *claim)):
            for body in [secret(settings(), "a-token"), *objects(*form_flags, *flags)]:
                check(body, version)


def test_the_checks_refuse_what_is_misspelt() -> None:
    for form in FORMS:
        body = objects("--deployment.kubernetes.form", form)[-1]
        next(pod_specs(body))["restartPolice"] = "Never"
        with pytest.raises(ValidationError):
            check(body, "1.37.0")
    body = objects("--deployment.kubernetes.form", "jobset")[-1]
    body["spec"]["failurePolicy"] = {"maxRestart": 3}
    with pytest.raises(AssertionError):
        check(body, "1.37.0")


@pytest.mark.parametrize("form", FORMS)
def test_pods_ask_for_gpus_run_as_nobody_special_and_get_the_token_from_the_secret(form: str) -> None:
    made = objects(*GPUS, "--deployment.kubernetes.form", form, "--deployment.grace_seconds", "300")
    pods = [pod for body in made for pod in pod_specs(body)]
    limits = [pod["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu") for pod in pods]
    assert limits == [None, "8", "4"]
    for pod in pods:
        [container] = pod["containers"]
        [token] = [entry for entry in container["env"] if entry["name"] == "HEADWAY_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "headway-run", "key": "token"}
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["terminationGracePeriodSeconds"] == 300
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("form", FORMS)
def test_pods_mount_the_secret_with_their_certificate_and_speak_tls(form: str) -> None:
    made = objects(*TLS, "--deployment.kubernetes.form", form)
    pods = [pod for body in made for pod in pod_specs(body)]
    assert len(pods) == 3
    for pod in pods:
        [container] = pod["containers"]
        assert {"name": "tls", "secret": {"secretName": "certificates"}} in pod["volumes"]
        assert {"name": "tls", "mountPath": "/etc/headway-tls", "readOnly": True} in container["volumeMounts"]
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert values["HEADWAY_URL"] == "https://headway-run:8500" and values["HEADWAY_TLS_NAME"] == "headway-run"
        assert values["HEADWAY_CA_FILE"] == "/etc/headway-tls/ca.crt"
        assert container["command"][-1].startswith("(umask 077 && cp /etc/headway-tls/tls.key /tmp/headway-tls.key)")
        probe = container.get("livenessProbe", {}).get("httpGet", {"scheme": "HTTPS"})
        assert probe["scheme"] == "HTTPS"
    printed = yaml.safe_load_all(preview(settings(*TLS), None))
    written = tomllib.loads(next(body for body in printed if body["kind"] == "ConfigMap")["data"]["rl.toml"])
    assert written["tls"] == {"certificate": "/etc/headway-tls/tls.crt", "key": "/tmp/headway-tls.key"}


@pytest.mark.parametrize("form", ["jobs", "jobset", "leaderworkerset"])
def test_ranks_of_several_nodes_meet_by_the_run(form: str) -> None:
    made = objects(*SEVERAL, "--deployment.kubernetes.form", form, "--deployment.kubernetes.claim", "shared")
    [script] = [
        pod["containers"][0]["command"][-1]
        for body in made
        for pod in pod_specs(body)
        if pod["containers"][0]["name"] == "trainer"
    ]
    assert 'train --run "$HEADWAY_URL" --hosts 2' in script


def test_what_kubernetes_would_refuse_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match="small letters"):
        objects("--run.name", "My_Run")
    with pytest.raises(UsageError, match=r"deployment\.kubernetes\.claim"):
        objects(*SEVERAL)
    with pytest.raises(UsageError, match="trainer_ranks is 1"):
        objects("--deployment.trainer.nodes", "2", "--deployment.kubernetes.claim", "shared")
    with pytest.raises(UsageError, match=r"deployment\.kubernetes\.tls_secret"):
        objects("--tls.certificate", "host.pem", "--tls.key", "host.key")


def test_a_dry_run_prints_what_would_be_applied_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_TOKEN", "a-secret-of-this-test")
    flags = ["--run.name", "run", "--deployment.type", "kubernetes", "--control.port", "9000", "--dry-run"]
    assert main.run(["rl", *flags]) == 0
    printed = capsys.readouterr().out
    made = list(yaml.safe_load_all(printed))
    assert "a-secret-of-this-test" not in printed and not list(tmp_path.iterdir())
    assert [body["kind"] for body in made] == ["ConfigMap", "Service", *["PersistentVolumeClaim"] * 2, *["Job"] * 3]
    assert found(made, "Service")["spec"]["ports"][0]["port"] == 9000
    assert list(yaml.safe_load_all(to_yaml(made))) == made
    (tmp_path / "rl.toml").write_text(made[0]["data"]["rl.toml"])
    load_settings(RlSettings, ["@", str(tmp_path / "rl.toml")])


@pytest.mark.parametrize(
    ("pod", "role", "asked", "expected"),
    [
        ("trainer", "exit 130", False, 0),
        ("trainer", "exit 7", False, 7),
        ("trainer", "trap 'exit 130' TERM; touch up; sleep 20 & wait", True, 130),
        ("head", "trap 'exit 130' TERM; touch up; sleep 20 & wait", True, 137),
    ],
    ids=["the run was stopped", "it failed", "the pod was told to end", "a head ends without a word to the others"],
)
def test_a_pod_that_was_told_to_end_is_started_again_and_one_of_a_stopped_run_is_not(
    pod: str, role: str, asked: bool, expected: int, tmp_path: Path
) -> None:
    script = next(pod_specs(found(objects(), "Job", f"-{pod}")))["containers"][0]["command"][-1]
    before, after = script.index("\n(\n") + 3, script.index("\n) &")
    process = subprocess.Popen(["sh", "-c", script[:before] + role + script[after:]], cwd=tmp_path)
    while asked and not (tmp_path / "up").exists():
        time.sleep(0.01)
    if asked:
        os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=120) == expected


def test_the_record_of_a_run_is_read_by_status_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "kubernetes.json").write_text(json.dumps({"namespace": "default", "name": "headway-run"}))
    assert main.run(["status", str(tmp_path)]) == 2
    assert "no Kubernetes cluster is configured here" in capsys.readouterr().err
