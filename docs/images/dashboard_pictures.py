"""Makes the pictures of the page from real runs, in a headless Chromium: light, and dark as NAME-dark.png.

python docs/images/dashboard_pictures.py outputs RUN --restarted OTHER_RUN --step 20
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "monitor"))

from chromium import ALL_PAINTED, PAINTED, Page, open_page

from headway.monitor.dashboard import start_in_thread

HERE = Path(__file__).parent
NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""After it, what was drawn is on the screen."""
LARGEST = 300_000
"""Bytes of a picture."""


async def take(page: Page, url: str, name: str, wait: str = "true") -> None:
    await page.goto(url)
    await page.until(wait)
    await page.live()
    await page.ask(NEXT_FRAME)
    data = await page.picture()
    if len(data) > LARGEST:
        raise SystemExit(f"{name} has {len(data)} bytes; make the window smaller")
    (HERE / f"{name}.png").write_bytes(data)
    print(f"{HERE / name}.png", len(data))


async def main(outputs: Path, run: str, restarted: str, step: int) -> None:
    url = start_in_thread(outputs)
    async with open_page() as page:
        for theme, end in (("light", ""), ("dark", "-dark")):
            await page.goto(url)
            await page.ask(f"localStorage.setItem('theme', '{theme}'), localStorage.setItem('shade', 'ratio')")
            await page.send("Page.reload")
            await page.until(f"document.documentElement.dataset.theme === '{theme}'")
            await take_all(page, url, run, restarted, step, end)
        if page.errors:
            raise SystemExit(f"the page reported errors: {page.errors}")


async def take_all(page: Page, url: str, run: str, restarted: str, step: int, end: str) -> None:
    """Take every picture in the theme that is set; their names get `end`."""
    charts = f"{PAINTED} > 6 && {ALL_PAINTED}"
    await page.size(1280, 860)
    await take(page, f"{url}#/run/{run}", f"dashboard-charts{end}", charts)
    many = "document.querySelectorAll('tr').length > 50"
    await take(page, f"{url}#/run/{run}/rollouts", f"dashboard-rollouts{end}", many)
    await page.size(1280, 560)
    await take(page, f"{url}#/run/{restarted}/lanes", f"dashboard-lanes{end}")
    await page.size(1280, 440)
    colored = (
        "[...document.querySelectorAll('.tok')].some(token => token.style.backgroundColor)"
        " && document.querySelector('.tok:not(.context)').dispatchEvent(new MouseEvent('mouseenter'))"
    )
    await take(page, f"{url}#/run/{run}/rollout/{step}/0?view=tokens", f"dashboard-tokens{end}", colored)
    await page.goto(f"{url}#/run/{run}/rollout/{step}/0")
    await page.press("d")
    await page.until("document.querySelector('del, ins') !== null")
    await take(page, f"{url}{await page.ask('location.hash')}", f"dashboard-diff{end}")
    await page.size(1280, 860)
    await take(page, f"{url}#/compare/{run}%2C{restarted}", f"dashboard-compare{end}", charts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("run")
    parser.add_argument("--restarted", required=True, help="a run whose processes were restarted, for the lanes")
    parser.add_argument("--step", type=int, default=1, help="the step to take the rollout from")
    options = parser.parse_args()
    asyncio.run(main(options.outputs, options.run, options.restarted, options.step))
