"""A real browser on Dagster's UI: what a person sees there.

It is a Chromium of the machine (`PGWAL_BROWSER`, or one on the PATH), which Playwright drives. Where there is none, nothing can be seen.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

GROUPS = ("source", "raw", "snapshot", "current", "marts")
SECONDS = 120.0  # a machine that does other things too
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MARK = re.compile(r"--tag-text-color: var\(--color-text-(\w+)\)")


def find_browser() -> str | None:
    """The program; None if there is none."""
    return os.environ.get("PGWAL_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def opened(address: str, *, width: int = 1600, height: int = 1000, scale: float = 1.0) -> Iterator[Page]:
    """A page whose addresses are below `address`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page(base_url=address, viewport={"width": width, "height": height}, device_scale_factor=scale)
        page.set_default_timeout(SECONDS * 1000)
        try:
            yield page
        finally:
            browser.close()


def group_marks(page: Page) -> dict[str, dict[str, int]]:
    """The marks of each group in the lineage of all assets: how many of its assets are green, blue (at work), yellow, red or gray."""
    page.goto("/asset-groups")
    boxes = page.locator("foreignObject.group")
    boxes.locator(".BaseTag").first.wait_for()
    found = {}
    for box in boxes.all():
        marks = [(_MARK.search(tag.get_attribute("style") or ""), tag.inner_text()) for tag in box.locator(".BaseTag").all()]
        found[box.locator("[data-tooltip]").first.inner_text()] = {mark[1]: int(text) for mark, text in marks if mark is not None}
    return found


def text_of(page: Page, path: str, awaited: str) -> str:
    """All text of a page, also what is cut off to fit, once it has `awaited` in it."""
    page.goto(path)
    page.wait_for_function("text => document.body.textContent.includes(text)", arg=awaited)
    return page.locator("body").text_content() or ""
