"""`headway config`: resolved settings with their origin, and the reference of all settings."""

from headway.base.errors import UsageError

HELP = """\
usage: headway config show COMMAND [@ settings.toml ...] [--setting value ...]
       headway config docs

show    print the settings that COMMAND would run with, as TOML, each with where it came from:
        default, the file, or the flag
docs    print the reference of all settings, as Markdown

Examples:
  headway config show rl @ base.toml @ mine.toml --trainer.optim.lr 1e-5
  headway config docs > docs/settings.md
"""


def run(argv: list[str]) -> int:
    match argv:
        case ["docs"]:
            from headway.config.reference import reference

            print(reference(), end="")
        case ["show", command, *rest]:
            _show(command, rest)
        case _:
            raise UsageError("`headway config` takes `show COMMAND ...` or `docs`; see `headway config --help`")
    return 0


def _show(command: str, argv: list[str]) -> None:
    from headway.config.commands import COMMAND_SETTINGS
    from headway.config.loader import load_settings
    from headway.config.toml import to_toml

    if command not in COMMAND_SETTINGS:
        raise UsageError(f"no settings for {command!r}; choose one of {', '.join(COMMAND_SETTINGS)}")
    resolved = load_settings(COMMAND_SETTINGS[command], argv)
    print(to_toml(resolved.settings, note=resolved.origin), end="")
