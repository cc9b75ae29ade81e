"""Options that are not settings: argparse, with errors of one line and the help of each command's HELP text."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from headway.base.errors import UsageError


class OptionParser(argparse.ArgumentParser):
    """The options of one command: names with their defaults, or with a type where there is none.

        OptionParser("rollouts", step=int, min_reward=0.5, n=4, json=False)

    `parse_known_args` leaves the rest, which are settings, as they stand.
    """

    def __init__(self, command: str, **options: object) -> None:
        super().__init__(prog=f"headway {command}", add_help=False, allow_abbrev=False)
        for name, value in options.items():
            flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            if value is False:
                self.add_argument(flag, action="store_true")
            elif isinstance(value, type):
                self.add_argument(flag, type=value)
            else:
                self.add_argument(flag, type=type(value), default=value)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate options of a command from settings: files after `@`, and flags whose names have dots or underscores."""
    own: list[str] = []
    settings: list[str] = []
    current = own
    for word in argv:
        if word.startswith("@"):
            current = settings
        elif word.startswith("--"):
            name = word.partition("=")[0]
            current = settings if "." in name or "_" in name else own
        current.append(word)
    return own, settings


def join_environment_arguments(argv: Sequence[str]) -> Iterator[str]:
    """Turn `--args.NAME VALUE`, whose names only the environment knows, into `--args=NAME=VALUE` for argparse."""
    words = iter(argv)
    for word in words:
        if not word.startswith("--args."):
            yield word
            continue
        name, equals, value = word.removeprefix("--args.").partition("=")
        given = value if equals else next(words, None)
        if given is None:
            raise UsageError(f"{word} wants a value after it")
        yield f"--args={name}={given}"


def environment_argument(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`: the value is JSON where it can be, else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def port_number(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535 (got {text!r})")
    return int(text)


def public_key(text: str) -> bytes:
    """Read the public key of a swarm."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise argparse.ArgumentTypeError(f"a key has 64 hexadecimal digits (got {text!r})")
    return found


def server_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be an address, http://HOST:PORT (got {text!r})")
    return text.rstrip("/")
