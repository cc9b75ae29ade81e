"""`headway logs`: the logs of all processes of a run, in one view."""

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

HELP = """\
usage: headway logs RUN|URL [PROCESS] [-n 20] [-f]

Prints the last lines of the newest log of every process of a run, or of those whose names begin with PROCESS. RUN is a
run folder; URL is the address of its control service, which demands the run's token (see `headway status --help`). Logs
of processes on other hosts have the host's name in front. With -f it goes on with new lines of all of them, each with
the name of its process, until the run has ended or Ctrl-C.

Examples:
  headway logs outputs/my-run
  headway logs outputs/my-run trainer -n 100
  headway logs outputs/my-run -f
  HEADWAY_TOKEN_FILE=token headway logs http://10.0.0.1:8500
"""


def run(argv: list[str]) -> int:
    from headway.launch.deployments.kubernetes import find_deployed
    from headway.launch.remote import RemoteRun

    parser = OptionParser("logs", n=20, f=False)
    parser.add_argument("run")
    parser.add_argument("process", nargs="?", default="")
    options = parser.parse_args(argv)
    if deployed := find_deployed(options.run):
        if options.f:
            raise UsageError("-f follows a run by its address; `kubectl logs -f` follows a pod")
        for name, lines in deployed.logs(options.process, options.n).items():
            print(f"== {name}", *lines, sep="\n")
        return 0
    run_ = RemoteRun(options.run)
    sizes = run_.log_sizes()  # before what is shown first, so that no line is missed
    for name in run_.newest_logs(options.process):
        print(f"== {name}")
        print(*run_.log_tail(name, options.n), sep="\n")
    if options.f:
        for process, line in run_.follow_logs(options.process, sizes):
            print(f"{process} | {line}", flush=True)
    return 0
