"""`headway doctor`: what this machine can do, and the remedy for what it cannot."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser, port_number
from headway.monitor.doctor.finding import Finding

HELP = """\
usage: headway doctor [--json] [--port PORT] [--output-dir FOLDER]
       headway doctor [--json] --deployment HOST:PORT --hosts N [--wait SECONDS]

Says what this machine can do: packages and pins, devices, engines, memory, disk, ports, limits,
sandboxes; and for each problem its remedy. Exits with 1 when something will not work.

  --json               the findings as JSON
  --port PORT          the port to try (8000)
  --output-dir FOLDER  where run folders will be made (outputs)
  --deployment ADDR    check the hosts of a run instead, before it starts: run this on each of them. They meet at ADDR,
                       the address that the run's control service will have on the first host, and compare versions,
                       clocks and GPUs, connect every host to every other, and measure gloo and NCCL
  --hosts N            how many they are
  --wait SECONDS       how long a host waits for the others (120)

Examples:
  headway doctor
  headway doctor --deployment 10.0.0.1:8500 --hosts 2
  srun --nodes 4 --ntasks-per-node 1 headway doctor --deployment node1:8500 --hosts 4
"""

SIGNS = {"ok": "✓", "note": "·", "warning": "!", "problem": "✗"}
COLORS = {"ok": "\x1b[32m", "note": "", "warning": "\x1b[33m", "problem": "\x1b[31m"}


def run(argv: list[str]) -> int:
    parser = OptionParser("doctor", json=False, output_dir=Path("outputs"))
    parser.add_argument("--port", type=port_number, default=8000)
    parser.add_argument("--deployment")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--wait", type=float, default=120.0)
    options = parser.parse_args(argv)
    if options.deployment is None and options.hosts is None:
        findings = list(examine(options.output_dir, options.port))
    else:
        findings = list(examine_hosts(options.deployment, options.hosts, options.wait))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _print(finding)
        print(_verdict(findings, "These hosts are" if options.deployment else "This machine is"))
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def examine(output_dir: Path, port: int) -> Iterator[Finding]:
    """Yield all findings about this machine."""
    from headway.monitor.doctor.machine import check_devices, check_resources
    from headway.monitor.doctor.packages import check_packages
    from headway.sandboxes.findings import check_sandboxes

    yield from check_packages()
    yield from check_devices()
    yield from check_resources(output_dir, port)
    yield from check_sandboxes()


def examine_hosts(address: str | None, hosts: int | None, wait: float) -> Iterator[Finding]:
    """Yield all findings about the hosts that run this command now. Raises UsageError and HeadwayError."""
    from headway.monitor.doctor.deployment import check_deployment, parse_address

    if address is None or hosts is None or hosts < 1:
        raise UsageError(
            "--deployment HOST:PORT and --hosts N go together: where the hosts meet, and how many they are"
        )
    yield from check_deployment(*parse_address(address), hosts, wait)


def _print(finding: Finding) -> None:
    paint, end = (COLORS[finding.status], "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"{paint}{SIGNS[finding.status]}{end} {finding.subject:<13} {finding.text}")
    if finding.remedy:
        print(f"  {'':<13} → {finding.remedy}")


def _verdict(findings: list[Finding], ready: str) -> str:
    problems = sum(finding.status == "problem" for finding in findings)
    warnings = sum(finding.status == "warning" for finding in findings)
    if not problems and not warnings:
        return f"\n{ready} ready."
    return f"\nProblems: {problems}, warnings: {warnings}. The lines after → say what to do."
