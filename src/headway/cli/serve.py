"""`headway serve`: a model over HTTP."""

from argparse import Namespace
from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

HELP = """\
usage: headway serve MODEL [--port 8000] [--host 127.0.0.1] [--dtype float32|bfloat16] [--device cpu|cuda]
                     [--engine embedded|vllm] [--join RUN|--run URL] [--name NAME] [--replicas N [--no-router]]
                     [@ CONFIG.toml ...] [--section.setting VALUE ...]

Serves a checkpoint folder or a built-in model (tiny, tiny-llama, tiny-moe) with OpenAI's routes and the inference
protocol: tokens in, tokens out, weight updates while requests are in flight.

  --engine NAME   vllm takes any argument of its own as --inference.vllm.NAME VALUE
  --join RUN      become an engine of the run in this folder; --name tells its engines apart
  --run URL       become an engine of a run on another host: settings come from there, and so does the end; the run's
                  token is read from HEADWAY_TOKEN or from the file that HEADWAY_TOKEN_FILE names
  --replicas N    start N engines at consecutive ports and keep them alive; vllm-router, where it is installed, takes
                  --port and spreads requests over them by their x-session-id, unless --join or --no-router is given
  @ FILE          a layer of settings; later layers and flags win
  --a.b VALUE     one setting (`headway config docs` lists all)

Routes that change the engine demand a bearer token: HEADWAY_TOKEN, or that of the run. Without one they are closed,
and only loopback addresses are served.

Examples:
  headway serve tiny
  headway serve checkpoints/my-model --port 8001 --dtype bfloat16
  headway serve tiny --replicas 2
  headway serve checkpoints/my-model --engine vllm --inference.vllm.tensor_parallel_size 2
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
"""

ALIASES = {
    "model": "model.path",
    "host": "inference.host",
    "port": "inference.port",
    "dtype": "model.dtype",
    "device": "placement.device",
    "engine": "inference.engine",
}


def run(argv: list[str]) -> int:
    import asyncio

    from headway.config.inference import ServeSettings
    from headway.config.loader import load_settings
    from headway.monitor.dry_run import write_dry_run
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import open_run

    parser = OptionParser("serve", join=Path, run=str, name=str, replicas=int)
    parser.add_argument("--no-router", dest="router", action="store_false")
    options, argv = parser.parse_known_args(argv)
    if argv and not argv[0].startswith(("-", "@")):
        argv = ["--model", *argv]
    if options.run:
        return _serve_elsewhere(options, argv)
    resolved = load_settings(ServeSettings, argv, aliases=ALIASES)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "serve"), sep="\n")
        return 0
    paths = open_run(options.join) if options.join else None
    name = options.name or "inference"
    if options.replicas is not None:
        from headway.launch.replicas import run_replicas

        run_replicas(settings, options.replicas, run=paths, name=options.name or "replica", router=options.router)
        return 0
    setup_logging(name, paths, json=settings.log.json_lines, level=settings.log.level)
    from headway.inference.serve import serve

    asyncio.run(serve(settings, paths, name))
    return 0


def _serve_elsewhere(options: Namespace, argv: list[str]) -> int:
    """Serve as an engine of the run whose control service is at `options.run`."""
    import asyncio

    from headway.config.inference import ServeSettings
    from headway.inference.serve import serve
    from headway.launch.joining import join, only_check
    from headway.launch.replicas import run_replicas
    from headway.monitor.logs import setup_logging
    from headway.transport.control.client import own_name

    if options.join:
        raise UsageError("--join names a run folder and --run a run's address; give one of them")
    if only_check(options.run, ServeSettings, argv, aliases=ALIASES):
        return 0
    joined = join(options.run, "inference", ServeSettings, argv, command="serve", aliases=ALIASES)
    settings, name = joined.settings, options.name or f"inference-{own_name()}"
    if options.replicas is not None:
        run_replicas(settings, options.replicas, run=joined.paths, url=options.run, name=name)
        return 0
    setup_logging(name, joined.paths, json=settings.log.json_lines, level=settings.log.level)
    asyncio.run(serve(settings, joined.paths, name, joined.client))
    return 0
