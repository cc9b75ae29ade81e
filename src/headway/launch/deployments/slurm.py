"""Slurm: a run as one batch job with a step per role, which resumes by itself when it is queued again."""

import os
import re
import shlex
import subprocess
import sys

from headway.base.errors import STOPPED, HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.deployment import DeploymentSettings
from headway.config.rl import RlSettings
from headway.config.toml import to_toml
from headway.core.runs import RunPaths
from headway.launch.deployments.roles import role_commands
from headway.transport.control.tokens import TOKEN, find_token, write_token

SCRIPT_FILE = "job.sh"
JOB_FILE = "slurm_job"
_END = "END_OF_HEADWAY_SETTINGS"
_ATTEMPTS = 20
"""Starts of a role's command on its node in one job."""

_SCRIPT = """\
#!/bin/bash
{options}
# A run of Headway over {nodes} nodes: the orchestrator on the first, then the trainer's, then the engines'. Every node
# has its own folder; they find each other by the control service at $HEADWAY_URL, with the token in HEADWAY_TOKEN.
set -u
{environment}
{setup}
: "${{HEADWAY_TOKEN:?set it before sbatch, to a secret of this run}}"
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
address_of() {{ scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p'; }}
export HEADWAY_RUN={name}
export HEADWAY_HOST=$(address_of "${{nodes[0]}}")
export HEADWAY_PORT={port}
export HEADWAY_URL={scheme}://$HEADWAY_HOST:$HEADWAY_PORT
export HEADWAY_SETTINGS=$(mktemp)
cat > "$HEADWAY_SETTINGS" <<'{end}'
{settings}{end}

# again COMMAND...: run it, and once more whenever it was killed, as for want of memory.
again='again() {{
  for attempt in $(seq {attempts}); do
    "$@"
    code=$?
    case "$code" in 134|135|137|139) ;; *) return "$code" ;; esac
    echo "killed (code $code); starting again"
    sleep 1
  done
  return "$code"
}}'
eval "$again"
# What each node does. Slurm sends a signal to all processes; this shell waits for the role, which handles it.
on_node="$again"'
export HEADWAY_NODE=$SLURMD_NODENAME
trap : TERM
role() ( eval "$1" )
again role "$1"'
# Stop all roles, which write their checkpoints; but not those of the next start, when this one is being ended already.
stop_all() {{
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ] || return
  timeout 5 scancel --signal=TERM "$SLURM_JOB_ID"
}}
# step FIRST_NODE NODES COMMAND: one task per node, in the background. Variables of COMMAND are those of its node.
# A role that fails for good stops the others.
step() {{
  (
    again srun --relative="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1{gpus} --kill-on-bad-exit=0 \\
      bash -c "$on_node" headway "$3"
    code=$?
    case "$code" in 0|{stopped}) ;; *) stop_all ;; esac
    exit "$code"
  ) &
}}
# Fewer than at first, where nodes were lost and it may go on without them.
export HEADWAY_TRAINER_NODES=$((${{#nodes[@]}} - 1 - {engine_nodes}))
step 0 1 '{head}'
head=$!
step 1 "$HEADWAY_TRAINER_NODES" '{trainer}'
step $((1 + HEADWAY_TRAINER_NODES)) {engine_nodes} '{engine}'

# The scheduler's notice before the time limit: let the steps write their checkpoints, then queue the job again.
requeue=
trap 'requeue=1; stop_all' USR1
code=0
while kill -0 "$head" 2>/dev/null; do wait "$head"; code=$?; done
# The others leave with the run; where it did not finish they are ended.
[ "$code" = 0 ] || stop_all
while [ -n "$(jobs -rp)" ]; do wait; done
rm -f "$HEADWAY_SETTINGS"
[ -z "$requeue" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def batch_script(settings: RlSettings, *, port: int | None = None) -> str:
    """Write the job's script. Without `port` the control service's follows from the job's number, so that jobs which
    share a node differ. Raises UsageError where nodes and ranks do not fit."""
    deployment = settings.deployment
    commands = role_commands(settings, deployment.python or sys.executable)
    if "'" in deployment.setup or _END in deployment.setup:
        raise UsageError("deployment.setup must not hold single quotes; put such lines into a file and source it")
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _options(settings)),
        nodes=deployment.nodes,
        environment="\n".join(f"export {key}={shlex.quote(value)}" for key, value in deployment.environment.items()),
        setup=deployment.setup,
        name=settings.run.name,
        port=port if port is not None else "$((20000 + SLURM_JOB_ID % 10000))",
        scheme="http" if settings.tls.certificate is None else "https",
        settings=to_toml(settings),
        end=_END,
        attempts=_ATTEMPTS,
        stopped=STOPPED,
        gpus=f" --gpus-per-node={_gpus(deployment)}" if _gpus(deployment) else "",
        head=commands.head,
        trainer=commands.trainer,
        engine=commands.engine,
        engine_nodes=deployment.inference.nodes,
    )


def preview(settings: RlSettings, port: int | None) -> str:
    return batch_script(settings, port=port)


def launch(settings: RlSettings, paths: RunPaths, port: int | None) -> bool:
    print(f"job {submit(settings, paths, port=port)}: see `squeue`, or `headway status {paths.root}`")
    return True


def submit(settings: RlSettings, paths: RunPaths, *, port: int | None = None) -> str:
    """Write the script into the run's folder here and submit it; returns the job's number. Raises HeadwayError.

    The token goes to the nodes in the job's environment, and stays in the folder for `headway status` and the like.
    """
    script = paths.root / SCRIPT_FILE
    write_atomic(script, batch_script(settings, port=port))
    write_token(paths)
    token = find_token(paths)
    assert token is not None
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], env={**os.environ, TOKEN: token}, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise UsageError(
            "deployment.type slurm needs `sbatch` here, on a login node; --dry-run shows the job"
        ) from None
    if done.returncode:
        raise HeadwayError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    write_atomic(paths.control / JOB_FILE, job)
    return job


def find_service(paths: RunPaths) -> str | None:
    """Return the address of the control service of a run that was submitted from this folder; None for other runs.

    Raises UsageError while its job does not run, and where there is no Slurm to ask.
    """
    try:
        job = (paths.control / JOB_FILE).read_text()
        script = (paths.root / SCRIPT_FILE).read_text()
    except FileNotFoundError:
        return None
    state, _, node = _ask("squeue", "--noheader", "--format=%T %B", f"--jobs={job}").partition(" ")
    if state != "RUNNING":
        now = f"is {state}" if state else "has ended"
        raise UsageError(f"job {job} of this run {now}; it answers while the job runs, and its files are on its nodes")
    found = re.search(r"NodeAddr=(\S+)", _ask("scontrol", "show", "node", node))
    host = found[1] if found else node
    scheme = "https" if "HEADWAY_URL=https:" in script else "http"
    chosen = re.search(r"^export HEADWAY_PORT=(\d+)$", script, re.MULTILINE)
    return f"{scheme}://{host}:{chosen[1] if chosen else 20000 + int(job) % 10000}"


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints; "" where it knows nothing of that job or node."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        raise UsageError(f"this run is a job of Slurm, and there is no `{command[0]}` here to find it with") from None


def _options(settings: RlSettings) -> list[str]:
    deployment = settings.deployment
    fewest = deployment.fewest_nodes
    return [
        f"--job-name=headway-{settings.run.name}",
        f"--nodes={deployment.nodes}" if fewest == deployment.nodes else f"--nodes={fewest}-{deployment.nodes}",
        "--exclusive",  # and no number of tasks: of MIN-MAX nodes Slurm would give as few as hold them
        *([f"--gpus-per-node={_gpus(deployment)}"] if _gpus(deployment) else []),
        "--requeue",
        "--open-mode=append",
        f"--output=headway-{settings.run.name}-%j.out",
        f"--signal=B:USR1@{deployment.grace_seconds}",
        *([f"--partition={deployment.partition}"] if deployment.partition else []),
        *([f"--account={deployment.account}"] if deployment.account else []),
        *([f"--time={deployment.time}"] if deployment.time else []),
        *deployment.options,
    ]


def _gpus(deployment: DeploymentSettings) -> int:
    return max(deployment.trainer.gpus, deployment.inference.gpus)
