"""`headway contribute`: work for a run with this machine."""

import asyncio
from pathlib import Path

from headway.cli.options import OptionParser, public_key, server_url

FOLDER = "~/.local/share/headway/contribute"

HELP = f"""\
usage: headway contribute URL [--folder DIR] [--run-key KEY] [--relay URL ...] [--env ID] [--device cpu|cuda]
                              [--dtype float32|bfloat16] [--threads N] [--engine embedded|vllm]

Samples rollouts for the run whose swarm service is at URL (docs/swarm.md): pulls orders, fetches the run's weights and
verifies them, plays the environment, uploads, and shows what was accepted or refused and why. Goes on until Ctrl-C;
killed, it continues where it was. Needs no open port.

  --folder DIR   folder of this worker: its key, weights, the order it is at ({FOLDER})
  --run-key KEY  the run's public key, 64 hexadecimal digits; without it, the key that this address showed first counts
  --relay URL    fetch weights there first; may be given several times, beside those that the run names
  --env ID       the environment as it is called here, where that is a file or an import path
  --device NAME  cpu or cuda; default: cuda where there is one
  --dtype NAME   precision to compute in; default: bfloat16 on cuda, float32 on a CPU and with vLLM
  --threads N    CPU threads of the engine; default: all cores
  --engine NAME  engine that samples: Headway's own (embedded, the default), or vLLM where it is installed

Examples:
  headway contribute https://run.example.org:8500
  headway contribute http://127.0.0.1:8500 --folder worker-2 --threads 1
  headway contribute https://run.example.org:8500 --engine vllm
"""


def run(argv: list[str]) -> int:
    from headway.launch.contribute.contributor import Contributor
    from headway.launch.contribute.options import ContributeOptions
    from headway.monitor.logs import setup_logging
    from headway.swarm.work.site import until_stopped

    parser = OptionParser("contribute", folder=Path(FOLDER), env=str, threads=int)
    parser.add_argument("url", type=server_url)
    parser.add_argument("--run-key", type=public_key)
    parser.add_argument("--relay", type=server_url, action="append", default=[])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    options = parser.parse_args(argv)
    setup_logging("contribute")
    contributor = Contributor(
        ContributeOptions(
            options.url,
            options.folder.expanduser(),
            options.run_key,
            options.relay,
            options.env,
            options.device,
            options.threads,
            options.dtype,
            options.engine,
        ),
        lambda line: print(line, flush=True),
    )
    return asyncio.run(until_stopped(contributor.run()))
