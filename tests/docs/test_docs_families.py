"""The table of families in docs/models.md is that of the registry."""

import json
from pathlib import Path

from headway.models.registry import families

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_of_families_is_the_registrys() -> None:
    own = [family for family in families() if type(family).__module__.startswith("headway.")]
    assert all(family.examples and family.notes for family in own)
    table = ["| family (`model_type`) | examples | notes |", "|---|---|---|"]
    table += [f"| `{family.model_type}` | {family.examples} | {family.notes} |" for family in own]
    section = PAGE.read_text().partition("## Families\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == table
    assert f"[{len(own)} families](docs/models.md)" in (PAGE.parents[1] / "README.md").read_text()


def test_the_table_of_families_in_vllm_is_what_was_measured() -> None:
    measured = json.loads((PAGE.parent / "measurements" / "vllm_families.json").read_text())["families"]
    own = [family.model_type for family in families() if type(family).__module__.startswith("headway.")]
    assert list(measured) == own
    table = ["| family | largest difference, or vLLM's reason |", "|---|---|"]
    for family, found in measured.items():
        said = f"{found['difference']:.1e}" if "difference" in found else found["reason"]
        table.append(f"| `{family}` | {said} |")
    section = PAGE.read_text().partition("## Families in vLLM\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == table
