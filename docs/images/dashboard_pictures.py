"""Makes the pictures of the dashboard from real runs, in a headless Chromium: light, and dark as NAME-dark.png.

python docs/images/dashboard_pictures.py [FOLDER]

The runs are made first, which takes longer than the quickstart; with FOLDER they stay there, and the next time only
what is missing is made.
"""

import argparse
import asyncio
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "monitor"))

from chromium import ALL_PAINTED, PAINTED, Page, open_page
from pictured_runs import HACKED, LEARNED, RESTARTED, make_runs
from PIL import Image

from headway.cli.dash import page_routes
from headway.core.records import recorded_steps
from headway.core.runs import RunPaths
from headway.monitor.dashboard import start_in_thread

HERE = Path(__file__).parent
NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""After it, what was drawn is on the screen."""
LARGEST = 150_000
"""Bytes of a picture."""
CHARTS = f"{PAINTED} > 6 && {ALL_PAINTED}"
COLORED = (
    "[...document.querySelectorAll('.tok')].some(token => token.style.backgroundColor)"
    " && document.querySelector('.tok:not(.context)').dispatchEvent(new MouseEvent('mouseenter'))"
)


async def take(page: Page, url: str, name: str, wait: str = "true", height: int = 700) -> None:
    await page.size(1280, height)
    await page.goto(url)
    await page.until(wait)
    await page.live()
    await page.ask(NEXT_FRAME)
    data = in_few_colors(await page.picture())
    if len(data) > LARGEST:
        raise SystemExit(f"{name} has {len(data)} bytes; make the window smaller")
    (HERE / f"{name}.png").write_bytes(data)
    print(f"{HERE / name}.png", len(data), flush=True)


def in_few_colors(png: bytes) -> bytes:
    """Write a picture with a palette of 256 colors, which makes it a third as large.

    The palette covers all colors, however small their share: the median cut would turn a green dot gray.
    """
    out = io.BytesIO()
    full = Image.open(io.BytesIO(png)).convert("RGB")
    small = full.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


async def take_all(page: Page, url: str, step: int, end: str, planned: bool) -> None:
    """Take every picture in the theme that is set; their names get `end`."""
    learned = f"{url}#/run/{LEARNED}"
    await take(page, learned, f"dashboard-charts{end}", CHARTS, 860)
    await take(page, f"{learned}/rollouts", f"dashboard-rollouts{end}", rows(50), 620)
    await take(page, f"{url}#/run/{RESTARTED}/lanes", f"dashboard-lanes{end}", height=560)
    await take(page, f"{learned}/rollout/{step}/0?view=tokens", f"dashboard-tokens{end}", COLORED, 440)
    await page.goto(f"{learned}/rollout/{step}/0")
    await page.press("d")
    await page.until("document.querySelector('del, ins') !== null")
    await take(page, f"{url}{await page.ask('location.hash')}", f"dashboard-diff{end}", height=440)
    await take(page, f"{url}#/compare/{LEARNED}%2C{RESTARTED}", f"dashboard-compare{end}", CHARTS, 860)
    await take(page, f"{learned}/evaluations", f"dashboard-evaluations{end}", rows(5), 560)
    await take(page, f"{url}#/run/{HACKED}/audit", f"dashboard-audit{end}", exists(".finding"), 380)
    await take(page, f"{learned}/cost", f"dashboard-cost{end}", exists(".tiles"), 560)
    await take(page, f"{learned}/steps/{step}", f"dashboard-steps{end}", exists(".card .mono"), 520)
    if planned:
        await take(page, f"{learned}/plan", f"dashboard-plan{end}", exists(".layout"), 650)


def rows(count: int) -> str:
    return f"document.querySelectorAll('tr').length > {count}"


def exists(selector: str) -> str:
    return f"document.querySelector('{selector}') !== null"


async def main(folder: Path, planned: bool) -> None:
    url = start_in_thread(folder, routes=page_routes())
    steps = recorded_steps(RunPaths(folder / LEARNED))
    async with open_page() as page:
        await page.send("Emulation.setScrollbarsHidden", hidden=True)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # or a dot is taken while it fades
        await page.send("Emulation.setEmulatedMedia", features=[still])
        for theme, end in (("light", ""), ("dark", "-dark")):
            await page.goto(url)
            await page.ask(f"localStorage.setItem('theme', '{theme}'), localStorage.setItem('shade', 'ratio')")
            await page.send("Page.reload")
            await page.until(f"document.documentElement.dataset.theme === '{theme}'")
            await take_all(page, url, steps[len(steps) // 3], end, planned)
        if page.errors:
            raise SystemExit(f"the page reported errors: {page.errors}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where the runs are made and kept (a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = (options.folder or Path(place)).resolve()
        planned = make_runs(folder)
        asyncio.run(main(folder, planned))
        if not planned:
            print("the picture of the plan was not taken: this machine was too busy to be measured")
