"""Slurm: a run as one batch job with a step per role, which resumes by itself when it is queued again."""

import os
import shlex
import subprocess
import sys

from headway.config.deployment import DeploymentSettings
from headway.config.rl import RlSettings
from headway.config.toml import to_toml
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.runs import RunPaths
from headway.launch.deployments.roles import role_commands
from headway.transport.control.tokens import TOKEN, find_token, write_token

SCRIPT_FILE = "job.sh"
JOB_FILE = "slurm_job"
_END = "END_OF_HEADWAY_SETTINGS"

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
export HEADWAY_TRAINER_HOST=$(address_of "${{nodes[1]}}")
export HEADWAY_ATTEMPT=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
export HEADWAY_SETTINGS=$(mktemp)
cat > "$HEADWAY_SETTINGS" <<'{end}'
{settings}{end}

# step FIRST_NODE NODES COMMAND: one task per node, in the background. Variables of COMMAND are those of its node.
step() {{
  srun --relative="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1{gpus} --kill-on-bad-exit=0 \\
    bash -c "export HEADWAY_NODE=\\$SLURMD_NODENAME; $3" &
}}
step 0 1 '{head}'
head=$!
step 1 {trainer_nodes} '{trainer}'
step {first_engine} {engine_nodes} '{engine}'

# The scheduler's notice before the time limit: let the steps write their checkpoints, then queue the job again.
requeue=
trap 'requeue=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
code=0
while kill -0 "$head" 2>/dev/null; do wait "$head"; code=$?; done
# The others leave with the run; where it failed they are ended.
[ "$code" = 0 ] || scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null
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
        gpus=f" --gpus-per-node={_gpus(deployment)}" if _gpus(deployment) else "",
        head=commands.head,
        trainer=commands.trainer,
        engine=commands.engine,
        trainer_nodes=deployment.trainer.nodes,
        engine_nodes=deployment.inference.nodes,
        first_engine=1 + deployment.trainer.nodes,
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


def _options(settings: RlSettings) -> list[str]:
    deployment = settings.deployment
    return [
        f"--job-name=headway-{settings.run.name}",
        f"--nodes={deployment.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
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
