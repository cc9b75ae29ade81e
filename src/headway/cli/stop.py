"""`headway stop`: ask a run to stop, from anywhere."""

from headway.cli.options import OptionParser

HELP = """\
usage: headway stop RUN|URL

Asks a run to stop as Ctrl-C does: the trainer finishes its step and writes a checkpoint, and all processes end, those
on other hosts too. Continue it with `headway rl --resume`. RUN is a run folder; URL is the address of its control
service, which demands the run's token (see `headway status --help`).

Examples:
  headway stop outputs/my-run
  HEADWAY_TOKEN_FILE=token headway stop http://10.0.0.1:8500
"""


def run(argv: list[str]) -> int:
    from headway.launch.deployments.kubernetes import find_deployed
    from headway.launch.remote import RemoteRun

    parser = OptionParser("stop")
    parser.add_argument("run")
    where = parser.parse_args(argv).run
    if deployed := find_deployed(where):
        deployed.stop()
        print(f"asked {where} to stop; its pods end when they have written their checkpoints")
        return 0
    run_ = RemoteRun(where)
    run_.stop()
    print(f"asked {run_.status().run} to stop")
    return 0
