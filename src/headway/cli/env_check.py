"""`headway env check`: whether an environment keeps the rules, with what to do where it does not."""

import asyncio
import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.options import OptionParser, environment_argument, join_environment_arguments

if TYPE_CHECKING:
    from headway.envs.conformance.check import Finding

MARKS = {"ok": "ok", "note": "note", "failed": "FAILED"}


def run(name: str, argv: list[str]) -> int:
    from headway.envs.conformance.check import check_environment_package

    options = parse(argv)
    failed = False
    results: list[dict[str, Any]] = []
    for label, id, args, paths in _environments(name):
        if sys.stderr.isatty():
            print(f"checking {label} in a process of its own …", file=sys.stderr)
        checking = check_environment_package(
            id,
            args | options.args,
            paths=paths,
            tasks=options.tasks,
            timeout=options.timeout,
            pass_env=options.pass_env,
        )
        findings = asyncio.run(checking)
        bad = sum(finding.result == "failed" for finding in findings)
        failed = failed or bad > 0
        results.append({"environment": label, "ok": not bad, "checks": [asdict(finding) for finding in findings]})
        if not options.json:
            print(_table(label, findings, bad))
    if options.json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    return 1 if failed else 0


def parse(argv: list[str]) -> Namespace:
    parser = OptionParser("env check", tasks=8, timeout=10.0, json=False)
    parser.add_argument("--args", type=environment_argument, action="append", default=[])
    parser.add_argument("--pass-env", action="append", default=[])
    options = parser.parse_args(list(join_environment_arguments(argv)))
    options.args = dict(options.args)
    return options


def _environments(name: str) -> list[tuple[str, str, dict[str, Any], list[str]]]:
    """Return the environments that a name or a package's folder stands for: label, id, arguments, module paths."""
    from headway.envs.packages.folder import read_package
    from headway.envs.registry import check_environment

    if ":" not in name and Path(name).is_dir():
        package = read_package(Path(name))
        return [(label, env.id, env.args, [str(package.code)]) for label, env in package.choices.items()]
    check_environment(name)
    return [(name, name, {}, [])]


def _table(label: str, findings: "list[Finding]", bad: int) -> str:
    width = max(len(finding.check) for finding in findings)
    lines = [label]
    for finding in findings:
        lines.append(f"  {MARKS[finding.result]:<6}  {finding.check:<{width}}  {finding.detail}".rstrip())
        if finding.advice:
            lines.append(f"          {'':<{width}}  → {finding.advice}")
    passed = len(findings) - bad
    lines.append(f"{label}: " + (f"{bad} of {len(findings)} checks failed" if bad else f"all {passed} checks passed"))
    return "\n".join(lines)
