"""`headway status`: where a run stands, from its folder or its address."""

from headway.cli.options import OptionParser

HELP = """\
usage: headway status RUN|URL [--json]

Shows a run's step, version, engines, checkpoints and the processes that joined it from other hosts. RUN is a run
folder; URL is the address of its control service, which demands the run's token: HEADWAY_TOKEN, or the file that
HEADWAY_TOKEN_FILE names. Of a run on Kubernetes, RUN shows the pods and the last line of each; `kubectl port-forward`
makes its address reachable from here.

Examples:
  headway status outputs/my-run
  HEADWAY_TOKEN_FILE=token headway status http://10.0.0.1:8500
"""


def run(argv: list[str]) -> int:
    import msgspec

    from headway.launch.deployments.kubernetes import find_deployed
    from headway.launch.remote import RemoteRun

    parser = OptionParser("status", json=False)
    parser.add_argument("run")
    options = parser.parse_args(argv)
    if deployed := find_deployed(options.run):
        lines = deployed.describe()
        print(msgspec.json.encode(lines).decode() if options.json else "\n".join(lines))
        return 0
    status = RemoteRun(options.run).status()
    if options.json:
        print(msgspec.json.encode(status).decode())
        return 0
    state = "ended" if status.ended else "finished" if status.finished else "stopping" if status.stop else "running"
    print(f"{status.run}: {state}, step {status.step} of {status.max_steps}, version {status.version}")
    print(f"checkpoints: {', '.join(map(str, status.checkpoints)) or 'none'}")
    for name, url in status.engines.items():
        print(f"engine {name}: {url}")
    for member in status.members:
        print(f"{member.role} {member.name} on {member.host}: heard {status.silent[member.name]:.0f} s ago")
    return 0
