"""The page travels with the package: every file it is made of is in the wheel and found there, and none is missing."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import headway.monitor.dashboard

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "headway" / "monitor" / "dashboard" / "static"
SERVED = "import json, headway.monitor.dashboard.server as it; print(json.dumps([it.__file__, *it._static_files()]))"


def test_the_wheel_carries_the_page_and_serves_it(tmp_path: Path) -> None:
    build = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    asked = subprocess.run(
        [sys.executable, "-c", SERVED], cwd=tmp_path, check=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    module, *served = json.loads(asked.stdout)
    assert module.startswith(str(tmp_path)), "the installed package was asked, not this checkout"
    assert set(served) == {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    assert (tmp_path / "installed" / "headway" / "monitor" / "dashboard" / "NOTICE").is_file()


def test_the_page_asks_for_files_that_are_there_and_preloads_every_module() -> None:
    static = files(headway.monitor.dashboard) / "static"
    page = (static / "index.html").read_text("utf-8")
    asked = re.findall(r'(?:href|src)="/static/([^"]+)"', page)
    assert asked and all((static / name).is_file() for name in asked)
    modules = {entry.name for entry in static.iterdir() if entry.name.endswith(".js")}
    imported = {
        name for module in modules for name in re.findall(r'from "\./([^"]+)"', (static / module).read_text("utf-8"))
    }
    assert imported == modules - {"app.js"} and modules <= set(asked)
