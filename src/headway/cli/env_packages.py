"""`headway env new`, `publish` and `add`: environments as packages, from a template to a run's lock."""

from argparse import Namespace
from pathlib import Path

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

LOCK_NAME = "environments.lock"
"""Where `env add` writes by default: the current folder."""


def new(argv: list[str]) -> int:
    from headway.envs.packages.template import write_template

    parser = OptionParser("env new")
    parser.add_argument("name")
    options = parser.parse_args(argv)
    folder = write_template(options.name, Path())
    module = options.name.replace("-", "_")
    print(
        f"{folder}: a package with an environment that works as it is. Edit src/{module}/environment.py, then:\n"
        f"  headway env check ./{folder}       does it keep the rules?\n"
        f"  headway env add ./{folder}         install it; {LOCK_NAME} says what was installed\n"
        f"  headway rl @ {folder}/rl.toml      train on it"
    )
    return 0


def publish(argv: list[str]) -> int:
    import tempfile

    from headway.envs.packages.folder import read_package
    from headway.envs.packages.index import publish_wheel
    from headway.envs.packages.wheel import build_wheel

    options = parse_publish(argv)
    if options.index is None:
        raise UsageError("--index FOLDER is missing: where the index is, or shall be")
    package = read_package(options.path)
    with tempfile.TemporaryDirectory() as scratch:
        entry = publish_wheel(build_wheel(package, Path(scratch)), options.index)
    print(f"{options.index / entry.file}  sha256 {entry.sha256}")
    print(f"others install it with `headway env add {entry.name}=={entry.version} --index {options.index}`")
    return 0


def parse_publish(argv: list[str]) -> Namespace:
    parser = OptionParser("env publish", index=Path)
    parser.add_argument("path", type=Path)
    return parser.parse_args(argv)


def add(argv: list[str]) -> int:
    from headway.envs.packages.add import add_locked, add_package

    options = parse_add(argv)
    if options.package is None:
        added = add_locked(options.lock)
    else:
        added = [add_package(options.package, options.lock, options.index, options.sha256)]
    for package in added:
        print(f"{package.name} {package.version} is installed, sha256 {package.sha256}; locked in {options.lock}")
        for name in package.environments:
            print(f"  {_setting(name)}")
    return 0


def parse_add(argv: list[str]) -> Namespace:
    parser = OptionParser("env add", index=str, lock=Path(LOCK_NAME), sha256=str)
    parser.add_argument("package", nargs="?")
    return parser.parse_args(argv)


def _setting(name: str) -> str:
    """Say how settings name an environment of a package that was just installed."""
    from headway.envs.registry import known_environments

    if name in known_environments():
        return f'[[orchestrator.envs]] id = "{name}"'
    return f'[[orchestrator.envs]] id = "verifiers", args = {{ taskset = "{name}" }}'
