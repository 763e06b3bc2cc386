"""The playground on the real target.

It makes the picture of the README: `PACELINE_SCREENSHOT=docs/images/playground.png`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import paceline
from e2e.live_server import start

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(CHROME is None, reason="needs a browser: chromium or google-chrome on the PATH"),
]
PICTURE = os.environ.get("PACELINE_SCREENSHOT")
QUESTION = "Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many apples does Tom have now?"


@pytest.fixture(scope="module")
def server():
    # Near-ties of bf16 may fall another way on another processor; only the picture is of that dtype.
    dtype = "bf16" if PICTURE else "fp32"
    generator = paceline.load("smollm2", dtype=dtype, drafter="phrase", other_drafters=["prompt_lookup"])
    running = start(generator, model="smollm2", prefix_tokens=4096)
    yield running
    running.stop()


def test_the_page_shows_a_run_and_a_draft_tree(server, tmp_path):
    picture = Path(PICTURE or tmp_path / "playground.png")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROME, args=["--no-sandbox", "--headless"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(server.url)
        page.get_by_text("Ready.").wait_for()
        page.get_by_label("Prompt").fill(QUESTION)
        for _ in range(2):
            # Once to warm up.
            page.get_by_role("button", name="Run").click()
            page.get_by_text("Both finished.").wait_for(timeout=120_000)
            page.get_by_text("Both texts are identical.").wait_for()
        words = page.locator("#speculative .answer [role=button][data-origin=phrase]")
        assert words.count() > 5, "phrases were drafted and kept"
        words.nth(words.count() // 2).click()
        page.locator("#round-title").filter(has_text="Round").wait_for()
        page.screenshot(path=picture, full_page=True)
        browser.close()
    assert picture.stat().st_size > 20_000
