"""`headway serve`: a model over HTTP."""

from pathlib import Path

from headway.cli.options import take
from headway.core.errors import UsageError

HELP = """\
usage: headway serve MODEL [--port 8000] [--host 127.0.0.1] [--dtype float32|bfloat16] [--device cpu|cuda]
                     [--engine embedded|vllm] [--join RUN [--name NAME]] [--replicas N [--no-router]]
                     [@ CONFIG.toml ...] [--section.setting VALUE ...]

Serves a checkpoint folder or a built-in model (tiny, tiny-llama, tiny-moe) with OpenAI's routes and the inference
protocol: tokens in, tokens out, weight updates while requests are in flight.

  --engine NAME   vllm takes any argument of its own as --inference.vllm.NAME VALUE
  --join RUN      become an engine of the run in this folder; --name tells its engines apart
  --replicas N    start N engines at neighbouring ports and keep them alive; vllm-router, where it is installed, takes
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
    argv, replicas = take(argv, "--replicas", "a number of engines")
    router, argv = "--no-router" not in argv, [word for word in argv if word != "--no-router"]
    if argv and not argv[0].startswith(("-", "@")):
        argv = ["--model", *argv]
    resolved = load_settings(ServeSettings, argv, aliases=ALIASES)
    settings = resolved.settings
    if resolved.dry_run:
        print(*write_dry_run(settings, "serve"), sep="\n")
        return 0
    paths = open_run(Path(join)) if join else None
    if replicas is not None:
        from headway.launch.replicas import run_replicas

        run_replicas(settings, _count(replicas), run=paths, name=name or "replica", router=router)
        return 0
    setup_logging(name or "inference", paths, json=settings.log.json_lines, level=settings.log.level)
    from headway.inference.serve import serve

    asyncio.run(serve(settings, paths, name or "inference"))
    return 0


def _count(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"--replicas needs a number of engines (got {text!r})")
    return int(text)
