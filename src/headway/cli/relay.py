"""`headway relay`: pass the weights of a swarm on."""

import asyncio
from argparse import ArgumentTypeError
from pathlib import Path

from headway.cli.options import OptionParser, port_number, public_key, server_url

HELP = """\
usage: headway relay URL [--from URL ...] [--share N/COUNT] [--host ADDRESS] [--port N] [--folder DIR]
                         [--run-key KEY] [--megabytes N] [--certificate FILE --key FILE]

Fetches every new version of the run whose swarm service is at URL, verifies each shard, and serves it to workers and
other relays while the rest still arrives (docs/swarm.md). Goes on until Ctrl-C, and after a break where it was.

  --from URL          fetch from these relays first, and from the run only where they fail; may be given several times
  --share N/COUNT     ask the run for this share of every version alone, such as 1/2, and relays with the other shares,
                      which --from names, for the rest: the run sends everything once
  --host ADDRESS      address to listen at (127.0.0.1)
  --port N            port; 0 picks a free one (8501)
  --folder DIR        folder of this relay: its key and the shards (headway-relay)
  --run-key KEY       the run's public key, 64 hexadecimal digits; default: the one that the run shows
  --megabytes N       send at most this many a second
  --certificate FILE  certificate and private key for TLS, which any address but loopback needs
  --key FILE

Examples:
  headway relay https://run.example.org:8500 --host relay.example.org --certificate cert.pem --key key.pem
  headway relay http://127.0.0.1:8500 --port 8502 --folder relay-2 --from http://127.0.0.1:8501
  headway relay http://127.0.0.1:8500 --share 1/2 --port 8501 --folder relay-1 --from http://127.0.0.1:8502
"""


def share(text: str) -> tuple[int, int]:
    """Read a share such as 1/2."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 1000):
        raise ArgumentTypeError(f"{text!r} is no share such as 1/2")
    return int(number) - 1, int(count)


def run(argv: list[str]) -> int:
    from headway.config.shared import TlsSettings
    from headway.monitor.logs import setup_logging
    from headway.swarm.work.site import swarm_tls, until_stopped

    parser = OptionParser(
        "relay",
        host="127.0.0.1",
        folder=Path("headway-relay"),
        megabytes=float,
        certificate=Path,
        key=Path,
    )
    parser.add_argument("url", type=server_url)
    parser.add_argument("--from", dest="relays", type=server_url, action="append", default=[])
    parser.add_argument("--share", type=share)
    parser.add_argument("--run-key", type=public_key)
    parser.add_argument("--port", type=port_number, default=8501)
    options = parser.parse_args(argv)
    setup_logging("relay")
    tls = swarm_tls(TlsSettings(certificate=options.certificate, key=options.key), options.host)
    limit = None if options.megabytes is None else options.megabytes * 1e6

    async def relay() -> None:
        from headway.orchestrator.run import open_session
        from headway.swarm.messages.keys import SigningKey
        from headway.swarm.weights.download import Mirrors, Share
        from headway.swarm.weights.peer import Peer
        from headway.swarm.weights.relay import Relay
        from headway.swarm.work.client import SwarmClient
        from headway.swarm.work.site import serve_while

        key = SigningKey.open(options.folder / "relay.key")
        async with open_session() as session:
            source, *relays = (Peer(url, session, key) for url in (options.url, *options.relays))
            client = SwarmClient(source, options.run_key)
            await client.terms()
            assert client.run_key is not None
            part = None if options.share is None else Share(*options.share)
            serving = Relay(Mirrors.of(source, relays), options.folder / "shards", client.run_key, limit, part)
            await serve_while(serving.app, options.host, options.port, tls, serving.watch(), "relay")

    return asyncio.run(until_stopped(relay()))
