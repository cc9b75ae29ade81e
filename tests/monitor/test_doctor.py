"""The doctor: findings that are true, with remedies."""

import json
import socket
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from headway.base.errors import UsageError
from headway.cli import doctor
from headway.monitor.doctor import machine, packages
from headway.monitor.doctor.deployment import HostFacts, check_clocks, check_facts, parse_address
from headway.monitor.doctor.finding import Finding
from headway.monitor.doctor.pins import Pin, parse_pin


@pytest.mark.parametrize(
    ("pin", "version", "allowed"),
    [
        ("torch<2.14,>=2.11", "2.13.0+cpu", True),
        ("torch<2.14,>=2.11", "2.14.0", False),
        ("torch>=2.11", "2.9.1", False),
        ("verifiers==0.4.0", "0.4", True),
        ("verifiers==0.4.0", "0.4.1", False),
        ("x!=1.2", "1.2.0", False),
        ("x~=1.4.2", "1.4.9", True),
        ("x~=1.4.2", "1.5.0", False),
        ("x~=1.4", "1.9", True),
        ("x>1.0,<=2", "1.0", False),
        ("x", "0.0.1", True),
    ],
)
def test_pins(pin: str, version: str, allowed: bool) -> None:
    parsed = parse_pin(pin)
    assert parsed is not None
    assert parsed.allows(version) is allowed


def test_pins_know_their_extra() -> None:
    assert parse_pin("Py_Arrow.X>=20; extra == 'data'") == Pin("py-arrow-x", SpecifierSet(">=20"), "data")
    assert parse_pin("headway[plot]; extra == 'dev'") == Pin("headway", SpecifierSet(), "dev")
    assert parse_pin("!") is None


def test_the_build_of_torch_is_read_truly_without_importing_it() -> None:
    build = packages.torch_build()
    assert build["__version__"] == torch.__version__
    assert build["cuda"] == torch.version.cuda


def test_this_environment_breaks_no_pin_of_the_core() -> None:
    assert [finding for finding in packages.check_packages() if finding.status == "problem"] == []


def statuses(findings: list[Finding], subject: str) -> list[str]:
    return [finding.status for finding in findings if finding.subject == subject]


def test_broken_pins_and_missing_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"msgspec": "0.1", "verifiers": "0.9", "torchvision": "0.20.0"}
    monkeypatch.setattr(packages, "installed", lambda package: versions.get(package))
    monkeypatch.setattr(packages, "requires", lambda package: ["torch==2.5.0", "numpy"])
    monkeypatch.setattr(
        packages,
        "headway_pins",
        lambda: [
            Pin("msgspec", SpecifierSet(">=0.20")),
            Pin("aiohttp", SpecifierSet()),
            Pin("verifiers", SpecifierSet("==0.4"), "verifiers"),
        ],
    )
    findings = list(packages.check_packages())
    texts = {finding.text: finding for finding in findings}
    assert texts["msgspec is 0.1, but Headway needs msgspec>=0.20"].remedy == "pip install 'msgspec>=0.20'"
    assert texts["aiohttp is missing"].status == "problem"
    assert texts["verifiers is 0.9, but the extra verifiers needs verifiers==0.4"].status == "warning"
    assert statuses(findings, "torchvision") == ["problem"]
    assert all(finding.remedy for finding in findings if finding.status in ("warning", "problem"))


@pytest.mark.parametrize(
    ("torch_version", "wanted", "found"),
    [
        ("2.13.0+cpu", "torch==2.5.0", ["problem"]),
        ("2.13.0+cpu", "torch==2.13.0", ["warning"]),
        ("2.13.0", "torch==2.13.0", []),
    ],
)
def test_companions_of_another_torch_are_found(
    torch_version: str, wanted: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "torch_build", lambda: {"__version__": torch_version, "cuda": None})
    monkeypatch.setattr(packages, "installed", lambda package: "0.28.0" if package == "torchvision" else None)
    monkeypatch.setattr(packages, "requires", lambda package: ["numpy", wanted])
    assert statuses(list(packages.check_packages()), "torchvision") == found


@pytest.mark.parametrize(
    ("build", "gpus", "status"),
    [
        ({"__version__": "2.13.0+cpu", "cuda": None}, [["H200", "143771", "580.82"]], "problem"),
        ({"__version__": "2.11.0", "cuda": "13.0"}, [["H200", "143771", "550.54"]], "problem"),
        ({"__version__": "2.11.0", "cuda": "13.0"}, [["H200", "143771", "580.82"]], "ok"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_problem(
    build: dict[str, str | None], gpus: list[list[str]], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    monkeypatch.setattr(machine, "query_gpus", lambda fields, timeout: gpus)
    findings = list(machine.check_devices())
    assert statuses(findings, "gpu")[0] == "ok"
    assert statuses(findings, "gpu")[-1] == status


def test_a_taken_port_is_a_warning() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        findings = list(machine.check_resources(Path("outputs"), port))
        assert statuses(findings, "port") == ["warning"]
    assert statuses(list(machine.check_resources(Path("outputs"), port)), "port") == ["ok"]


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    findings = list(machine.check_resources(Path("/proc/nothing/here"), 0))
    assert statuses(findings, "disk")[0] == "problem"


def test_a_proxy_that_swallows_loopback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.setenv("no_proxy", "example.org")
    assert statuses(list(machine.check_resources(Path("outputs"), 0)), "proxy") == ["warning"]
    monkeypatch.setenv("no_proxy", "example.org,127.0.0.1")
    assert statuses(list(machine.check_resources(Path("outputs"), 0)), "proxy") == []


def test_problems_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folder, port: iter([Finding("disk", "warning", "small", "clean it")]))
    assert doctor.run([]) == 0
    assert "→ clean it" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda folder, port: iter([Finding("disk", "problem", "gone", "buy one")]))
    assert doctor.run(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["remedy"] == "buy one"


def host(name: str, torch: str = "2.13.0", gpus: int = 0) -> HostFacts:
    return HostFacts(name, "10.0.0.1", "eth0", "0.1.0", torch, ["H200"] * gpus, nccl=gpus > 0)


def test_hosts_that_differ_are_named() -> None:
    alike = list(check_facts([host("a", gpus=8), host("b", gpus=8)]))
    assert {finding.status for finding in alike} == {"ok"}
    differ = list(check_facts([host("a"), host("b", torch="2.12.0", gpus=4)]))
    assert statuses(differ, "versions") == ["ok", "problem"] and statuses(differ, "gpus") == ["note"]
    assert any("a 2.13.0, b 2.12.0" in finding.text for finding in differ)
    assert check_clocks([host("a"), host("b")], [100.0, 100.5]).status == "ok"
    late = check_clocks([host("a"), host("b")], [100.0, 107.25])
    assert late.status == "warning" and late.text == "b is 7.2 s ahead of a"


def test_the_address_of_a_deployment() -> None:
    assert parse_address("10.0.0.1:8500") == ("10.0.0.1", 8500) and parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("10.0.0.1", "10.0.0.1:", ":8500", "host:0", "host:99999", "host:http"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            parse_address(wrong)
    with pytest.raises(UsageError, match="go together"):
        list(doctor.examine_hosts(None, 2, 1.0))
