"""`headway swarm`: keys of a swarm, and the audit of its ledger."""

from pathlib import Path

from headway.cli.options import OptionParser
from headway.core.errors import UsageError

HELP = """\
usage: headway swarm audit LEDGER [--key KEY]
       headway swarm key FILE

audit: checks a swarm's ledger, which anyone can do who has the file: that no line was changed, left out or moved,
that the run's key signed them all, and that the run kept its own rules. Shows every worker's record. Exits with 4
where the ledger was tampered with, and with 1 where a rule was broken.
key: shows the public key of the private key in FILE; makes one where there is none.

  --key KEY   the run's public key, 64 hexadecimal digits (the one that the ledger itself names)

Examples:
  headway swarm audit ledger.jsonl
  headway swarm key ~/.config/headway/swarm.key
"""


def run(argv: list[str]) -> int:
    match argv:
        case ["audit", *rest]:
            return audit(rest)
        case ["key", *rest]:
            return key(rest)
    raise UsageError("say `headway swarm audit LEDGER` or `headway swarm key FILE`; see `headway swarm --help`")


def audit(argv: list[str]) -> int:
    from headway.swarm.audit import audit_ledger, report_lines

    parser = OptionParser("swarm audit", key=str)
    parser.add_argument("ledger", type=Path)
    options = parser.parse_args(argv)
    report = audit_ledger(options.ledger, None if options.key is None else _public_key(options.key))
    print("\n".join(report_lines(report)))
    return int(bool(report.problems))


def key(argv: list[str]) -> int:
    from headway.swarm.keys import SigningKey

    parser = OptionParser("swarm key")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    print(SigningKey.open(options.file).public.hex())
    return 0


def _public_key(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise UsageError(f"--key {text}: a key has 64 hexadecimal digits")
    return found
