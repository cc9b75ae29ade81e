"""`headway orchestrate`: the orchestrator of a run by itself."""

from headway.base.errors import STOPPED
from headway.cli.options import OptionParser

HELP = """\
usage: headway orchestrate @ CONFIG.toml [@ MORE.toml ...] [--section.setting VALUE ...]
       headway orchestrate --run URL [--section.setting VALUE ...]

Runs environments against the engines of a run, turns their episodes into batches for its trainer, and brings new
weights to the engines. It resumes after the last batch it sent, so it can be stopped and started at any time.

  --run URL         be the orchestrator of a run on another host: settings come from there, files stay in a folder here
  @ FILE            a layer of settings; later layers and flags win
  --a.b.c VALUE     one setting (`headway config docs` lists all)
  --run.name NAME   the run to take part in, which is made if it doesn't exist
  --dry-run         write the resolved settings and exit

Examples:
  headway orchestrate @ outputs/my-run/config/orchestrator.toml
  headway orchestrate @ rl.toml --run.name my-run --orchestrator.engines '["http://127.0.0.1:8000"]'
"""


def run(argv: list[str]) -> int:
    from headway.config.loader import load_settings
    from headway.config.orchestrator import OrchestrateSettings
    from headway.monitor.dry_run import write_dry_run
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import join_run
    from headway.orchestrator.run import orchestrate
    from headway.transport.control.folder import FolderControl

    options, argv = OptionParser("orchestrate", run=str).parse_known_args(argv)
    if options.run:
        return _orchestrate_elsewhere(options.run, argv)
    resolved = load_settings(OrchestrateSettings, argv)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "orchestrate"), sep="\n")
        return 0
    paths = join_run(settings.run, "orchestrate")
    setup_logging("orchestrator", paths, json=settings.log.json_lines, level=settings.log.level)
    control = FolderControl(paths)
    return 0 if orchestrate(settings, paths, control) else STOPPED


def _orchestrate_elsewhere(url: str, argv: list[str]) -> int:
    """Orchestrate the run whose control service is at `url`."""
    from headway.config.orchestrator import OrchestrateSettings
    from headway.launch.joining import join, only_check
    from headway.monitor.logs import setup_logging
    from headway.orchestrator.run import orchestrate
    from headway.transport.control.client import JoinedControl

    if only_check(url, OrchestrateSettings, argv):
        return 0
    joined = join(url, "orchestrator", OrchestrateSettings, argv, command="orchestrate")
    log = joined.settings.log
    setup_logging("orchestrator", joined.paths, json=log.json_lines, level=log.level)
    control = JoinedControl(joined.client, joined.paths, "orchestrator", "orchestrator")
    try:
        return 0 if orchestrate(joined.settings, joined.paths, control) else STOPPED
    finally:
        control.close()
