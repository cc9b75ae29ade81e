"""`headway serve`: a model over HTTP."""

from pathlib import Path

from headway.cli.options import take

HELP = """\
usage: headway serve MODEL [--port 8000] [--host 127.0.0.1] [--dtype float32|bfloat16] [--device cpu|cuda]
                     [--join RUN [--name NAME]] [@ CONFIG.toml ...] [--section.setting VALUE ...]

Serves a checkpoint folder or a built-in model (tiny, tiny-llama, tiny-moe) with OpenAI's routes and the inference
protocol: tokens in, tokens out, weight updates while requests are in flight.

  --join RUN      become an engine of the run in this folder; --name tells its engines apart
  @ FILE          a layer of settings; later layers and flags win
  --a.b VALUE     one setting (`headway config docs` lists all)

Routes that change the engine demand a bearer token: HEADWAY_TOKEN, or that of the run. Without one they are closed,
and only loopback addresses are served.

Examples:
  headway serve tiny
  headway serve checkpoints/my-model --port 8001 --dtype bfloat16
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
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP, end="")
        return 0
    import asyncio

    from headway.config.inference import ServeSettings
    from headway.config.loader import load_settings
    from headway.monitor.dry_run import write_dry_run
    from headway.monitor.logs import setup_logging
    from headway.monitor.runs import open_run

    argv, join = take(argv, "--join", "the folder of a run, such as outputs/my-run")
    argv, name = take(argv, "--name", "a name for this engine")
    if argv and not argv[0].startswith(("-", "@")):
        argv = ["--model", *argv]
    resolved = load_settings(ServeSettings, argv, aliases=ALIASES)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "serve"), sep="\n")
        return 0
    paths = open_run(Path(join)) if join else None
    setup_logging(name or "inference", paths, json=settings.log.json_lines, level=settings.log.level)
    from headway.inference.serve import serve

    asyncio.run(serve(settings, paths, name or "inference"))
    return 0
