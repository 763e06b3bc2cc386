"""The playground in a real browser, on the real server."""

from __future__ import annotations

import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROME is None, reason="needs a browser: chromium or google-chrome")


@pytest.fixture(scope="module")
def page(live):
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROME, args=["--no-sandbox", "--headless"])
        opened = browser.new_page(viewport={"width": 1300, "height": 900})
        complaints = []
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(live.url)
        opened.get_by_text("Ready.").wait_for()
        yield opened
        assert complaints == []
        browser.close()


def test_both_columns_answer_with_the_same_text(page, solo):
    question = "tell me a story about the cat"
    page.get_by_label("Prompt").fill(question)
    page.get_by_label("Most tokens").fill("24")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Both finished.").wait_for(timeout=60_000)
    page.get_by_text("Both texts are identical.").wait_for()
    expected = solo([{"role": "user", "content": question}]).text
    for column in ("#plain", "#speculative"):
        shown = page.locator(f"{column} .answer").inner_text()
        assert "".join(shown.split()) == "".join(expected.split())


def test_a_word_shows_its_round(page):
    page.locator("#speculative .answer [role=button]").first.click()
    page.get_by_role("heading", name="Round 1").wait_for()
    assert "forward" in page.locator("main").inner_text()


def test_drafters_that_are_loaded_are_offered(page):
    offered = page.get_by_label("Drafter", exact=True).locator("option").all_inner_texts()
    assert set(offered) == {"phrase", "prompt_lookup"}, "the other column is the one without"
