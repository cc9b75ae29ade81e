"""A real run that trains on strangers alone: twelve workers in network namespaces, over TLS, four of which lie.

    python benchmarks/swarm.py run [--steps 40] [--honest-only] [--minutes 8] [--results FILE]

Four honest workers (two compute in bfloat16, one samples with vLLM), two slow ones (low CPU priority, 4 Mbit/s), two
that are killed (-9) and come back all the time, and four liars, which go through eight kinds of lies, each with a new
key. Links have unequal rates by `tc`. The model is the built-in tiny one; the environment (letters.py) can be learned
by it from nothing.

Prints one JSON object: contributions by kind and verdict, and the mean reward of every step. Bars: at least 99 % of
lies are refused before they are trained on, at most 0.5 % of honest contributions; once --honest-only was run, too, the
mean rewards of the last steps differ by no more than equal runs do (0.1). Needs root, `ip`, `tc` and vLLM.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from headway.base.processes import free_port  # noqa: E402
from headway.core.records import read_rollouts  # noqa: E402
from headway.core.runs import RunPaths  # noqa: E402
from headway.swarm.messages.keys import SigningKey  # noqa: E402
from headway.swarm.trust.audit import audit_ledger  # noqa: E402
from headway.swarm.trust.events import Judged  # noqa: E402
from headway.swarm.trust.ledger import read_ledger  # noqa: E402
from namespaces import Host, Network, make_certificates, missing, network  # noqa: E402 - lies there

RESULTS = ROOT / "benchmarks" / "results" / "swarm_run.json"
PARTS = Path(__file__).parent
LETTERS = f"{PARTS / 'letters.py'}:Letters"
KINDS = (
    *("other_weights", "older_version", "quantized_weights", "other_temperature"),
    *("edited_tokens", "edited_logprobs", "replayed", "invented_rewards"),
)
ROLES = {
    **{f"honest-{n}": ("100mbit", 0) for n in range(4)},
    **{f"slow-{n}": ("4mbit", 4) for n in range(2)},
    **{f"vanishing-{n}": ("20mbit", 0) for n in range(2)},
    **{f"liar-{n}": ("50mbit", 0) for n in range(4)},
}
"""Workers, with the rate of their links and how nice they are to others on the CPU."""
BFLOAT16 = ("--dtype", "bfloat16")
CHOICES = {"honest-1": BFLOAT16, "honest-2": ("--engine", "vllm"), "honest-3": BFLOAT16}
"""Options of honest workers. Others compute in float32 with the embedded engine."""
VANISH_AFTER, GONE_SECONDS = 3, 5.0
"""Accepted contributions after which a vanishing worker is killed, and the time until it comes back."""
LEAST_LIES, MOST_HONEST, LAST = 0.99, 0.005, 5
MOST_DIFFERENCE = 0.1
"""Two runs with the same workers and lies differed by 0.08 in the mean reward of their last steps."""


class RealRun:
    """Processes of a run and its swarm, each with a log in `folder`."""

    def __init__(self, folder: Path, steps: int, stack: ExitStack) -> None:
        self.folder, self._steps, self._stack = folder, steps, stack
        self.paths = RunPaths(folder / "outputs" / "swarm")
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        log = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, env=self._environment
        )
        self._stack.callback(end, process)
        return process

    def train(self, certificates: Path) -> "subprocess.Popen[bytes]":
        options = {
            "only": "trainer,orchestrator",
            "run.name": "swarm",
            "max_steps": self._steps,
            "seq_len": 128,
            "audit": "false",
            "model.path": "tiny",
            "trainer.optim.lr": 3e-3,
            "tls.certificate": certificates / "service.pem",
            "tls.key": certificates / "service.key",
            "orchestrator.swarm": "true",
            "orchestrator.batch_size": 32,
            "orchestrator.group_size": 4,
            "orchestrator.max_lag": 2,
            "orchestrator.sampling.max_tokens": 8,
            "orchestrator.envs": f'[{{id = "{LETTERS}", name = "letters"}}]',
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return self.start("rl", *headway("rl", *flags))

    def serve(self, address: str) -> str:
        until((self.paths.config / "orchestrator.toml").is_file)
        port = free_port(address)
        self.start("serve", *headway("swarm", "serve", str(self.paths.root), "--host", address, "--port", str(port)))
        until(lambda: "swarm service: " in (self.folder / "serve.log").read_text())
        return f"https://{address}:{port}"

    def work(self, name: str, host: Host, url: str) -> "subprocess.Popen[bytes]":
        """Start a worker in its namespace."""
        if name.startswith("liar"):
            first = int(name[-1])
            kinds = (KINDS[first], KINDS[first + 4])
            command = [sys.executable, str(PARTS / "swarm_liar.py"), url, name, LETTERS, *kinds]
        else:
            options = ("--device", "cpu", "--threads", "1", *CHOICES.get(name, ()))
            command = headway("contribute", url, "--folder", name, "--env", LETTERS, *options)
        return self.start(name, *host.enter("nice", "-n", str(ROLES[name][1]), *command))

    def work_all(self, names: list[str], hosts: dict[str, Host], url: str) -> "dict[str, subprocess.Popen[bytes]]":
        """Start all workers, the one with vLLM first, which takes minutes until it works, and the other honest and fast
        ones last: they could do everything before a liar is there."""
        workers = {name: self.work(name, hosts[name], url) for name, chosen in CHOICES.items() if "vllm" in chosen}
        for name in workers:
            until(lambda log=self.folder / f"{name}.log": "accepted;" in log.read_text(), 900.0)  # type: ignore[misc]
        late = [name for name in names if name.startswith("honest") and name not in workers]
        workers |= {name: self.work(name, hosts[name], url) for name in names if name not in (*late, *workers)}
        for name in (name for name in workers if name.startswith("liar")):
            log = self.folder / f"{name}.log"
            until(lambda log=log: "this worker is" in log.read_text())  # type: ignore[misc]
        return workers | {name: self.work(name, hosts[name], url) for name in late}

    def trust(self, authority: Path) -> None:
        self._environment["HEADWAY_CA_FILE"] = str(authority)


def headway(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headway.cli.main", *arguments]


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit("waited too long for a process to start")
        time.sleep(0.2)


def limit_links(made: Network) -> None:
    """Bound what each worker's link carries, both ways."""
    for host, (rate, _) in zip(made.hosts, ROLES.values(), strict=False):
        shaped = ["tc", "qdisc", "add", "dev"]
        rule = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        subprocess.run([*shaped, host.link, *rule], check=True)
        subprocess.run(host.enter(*shaped, "eth0", *rule), check=True)


def run_once(folder: Path, steps: int, minutes: float, honest_only: bool) -> dict[str, object]:
    names = [name for name in ROLES if not (honest_only and name.startswith("liar"))]
    with network(len(ROLES)) as made, ExitStack() as stack:
        limit_links(made)
        service = Host("service", made.address, "")
        authority = make_certificates(folder / "certificates", [service])
        run = RealRun(folder, steps, stack)
        run.trust(authority)
        began = time.monotonic()
        training = run.train(folder / "certificates")
        url = run.serve(made.address)
        hosts = dict(zip(ROLES, made.hosts, strict=True))
        workers = run.work_all(names, hosts, url)
        kills = watch(run, training, workers, hosts, url, time.monotonic() + minutes * 60)
        finished, seconds = training.poll() == 0, time.monotonic() - began
    return {"finished": finished, "seconds": round(seconds, 1), "kills": kills, **judged(run, names)}


def watch(
    run: RealRun,
    training: "subprocess.Popen[bytes]",
    workers: "dict[str, subprocess.Popen[bytes]]",
    hosts: dict[str, Host],
    url: str,
    give_up: float,
) -> int:
    """Kill the vanishing workers once they have worked, and start them again after a while, until the run has ended.
    Returns how often."""
    done = {name: 0 for name in workers if name.startswith("vanishing")}
    back: dict[str, float] = {}
    kills = 0
    while training.poll() is None and time.monotonic() < give_up:
        time.sleep(0.2)
        for name in done:
            accepted = (run.folder / f"{name}.log").read_text().count("accepted;")
            if name in back and time.monotonic() > back[name]:
                del back[name]
                workers[name] = run.work(name, hosts[name], url)
            elif name not in back and accepted >= done[name] + VANISH_AFTER:
                workers[name].send_signal(signal.SIGKILL)
                workers[name].wait()
                kills, done[name], back[name] = kills + 1, accepted, time.monotonic() + GONE_SECONDS
    return kills


def judged(run: RealRun, names: list[str]) -> dict[str, object]:
    """Read the ledger and the trained rollouts: what became of lies and of honest work, and the rewards."""
    lies: dict[str, str] = {}
    for file in run.folder.glob("liar-*/lies.jsonl"):
        lies |= {line["order"]: line["kind"] for line in map(json.loads, file.read_text().splitlines())}
    ledger = run.paths.swarm / "ledger.jsonl"
    events = [line.event for line in read_ledger(ledger)]
    verdicts = {event.order: event.verdict for event in events if isinstance(event, Judged)}
    trained = {record.group for step in steps_of(run.paths) for record in read_rollouts(run.paths, step)}
    kinds: dict[str, Counter[str]] = {}
    for order, verdict in verdicts.items():
        counts = kinds.setdefault(lies.get(order, "honest"), Counter())
        counts["sent"] += 1
        counts["accepted" if verdict.accepted else f"refused by {verdict.check}"] += 1
        counts["trained"] += order in trained
        counts["rescored"] += verdict.rescored
    told = [counts for kind, counts in kinds.items() if kind != "honest"]
    sent, lied = kinds.get("honest", Counter())["sent"], sum(counts["sent"] for counts in told)
    refused = {name: sum(count for what, count in kinds[name].items() if what.startswith("refused")) for name in kinds}
    report = audit_ledger(ledger)
    return {
        "workers": names,
        "options": {name: " ".join(chosen) for name, chosen in CHOICES.items()},
        "lies_refused": round(sum(refused[kind] for kind in kinds if kind != "honest") / lied, 4) if lied else 1.0,
        "lies_trained": sum(counts["trained"] for counts in told),
        "honest_refused": round(refused.get("honest", 0) / max(1, sent), 4),
        "kinds": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "accepted_by_worker": accepted_by_worker(run, report.trust.workers),
        "audit_problems": report.problems,
        "rewards": [
            round(statistics.mean(record.episode.reward for record in read_rollouts(run.paths, step)), 4)
            for step in steps_of(run.paths)
        ],
    }


def accepted_by_worker(run: RealRun, workers: Mapping[str, Any]) -> dict[str, int]:
    keys = {path.parent.name: SigningKey.open(path).public.hex() for path in run.folder.glob("*/worker.key")}
    return {name: workers[key].accepted for name, key in sorted(keys.items()) if key in workers}


def steps_of(paths: RunPaths) -> list[int]:
    return sorted(int(path.name[5:11]) for path in paths.rollouts.glob("step_*.jsonl.gz"))


def difference(with_liars: list[float], honest: list[float]) -> float:
    """Return by how much the mean rewards of the last steps differ."""
    return statistics.mean(with_liars[-LAST:]) - statistics.mean(honest[-LAST:])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--honest-only", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder that keeps runs and logs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if reason := missing() or ("" if find_spec("vllm") else "vLLM is not installed"):
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that no namespace stays behind
    name = "honest_only" if options.honest_only else "with_liars"
    with tempfile.TemporaryDirectory(prefix="headway-swarm-") as made:
        folder = (options.keep or Path(made)) / name
        folder.mkdir(parents=True)
        found = run_once(folder, options.steps, options.minutes, options.honest_only)
    known = json.loads(options.results.read_text()) if options.results.is_file() else {}
    known[name] = found
    if len(known) > 1 and all(len(known[of]["rewards"]) > LAST for of in ("honest_only", "with_liars")):
        found_difference = difference(known["with_liars"]["rewards"], known["honest_only"]["rewards"])
        known["reward_difference"] = round(found_difference, 4)
    text = json.dumps(known, indent=1)
    options.results.write_text(text + "\n")
    print(text)
    held = found["finished"] and found["lies_refused"] >= LEAST_LIES and found["honest_refused"] <= MOST_HONEST  # type: ignore[operator]
    sys.exit(int(not held or abs(known.get("reward_difference", 0.0)) > MOST_DIFFERENCE))
