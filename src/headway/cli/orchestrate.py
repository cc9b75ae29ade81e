"""`headway orchestrate`: the orchestrator of a run by itself."""

HELP = """\
usage: headway orchestrate @ CONFIG.toml [@ MORE.toml ...] [--section.setting VALUE ...]

Runs environments against the engines of a run, turns their episodes into batches for its trainer, and brings new
weights to the engines. It resumes after the last batch it sent, so it can be stopped and started at any time.

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

    resolved = load_settings(OrchestrateSettings, argv)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "orchestrate"), sep="\n")
        return 0
    paths = join_run(settings.run, "orchestrate")
    setup_logging("orchestrator", paths, json=settings.log.json_lines, level=settings.log.level)
    orchestrate(settings, paths)
    return 0
