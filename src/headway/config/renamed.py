"""Settings and values that once had another name: they are refused with an error that gives the present one."""

import re

SETTINGS: dict[str, str] = {
    "trainer.replicas": "trainer.parallel.replicate",
}
"""Former to present dotted names, of settings or of whole sections; `N` stands for the index of a list's item."""
VALUES: dict[tuple[str, str], str] = {
    ("weights.type", "collective"): "point_to_point",
}
"""Setting and former value to its present value."""


def present_name(name: str) -> str | None:
    """Look up the present name of a setting that was renamed; None if it was not."""
    indices = iter(re.findall(r"(?<=\.)\d+(?=\.)", name))
    generic = re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
    for former, present in SETTINGS.items():
        if generic == former or generic.startswith(f"{former}."):
            return re.sub(r"(?<=\.)N(?=\.)", lambda _: next(indices), present + generic[len(former) :])
    return None


def present_value(name: str, value: object) -> str | None:
    """Look up the present name of a value that was renamed; None if it was not."""
    return VALUES.get((re.sub(r"(?<=\.)\d+(?=\.)", "N", name), value)) if isinstance(value, str) else None
