"""The playground in a real browser, against a server with canned answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unit.server.fake_server import PLAYGROUND, FakeServer, speculative_rounds

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    CHROME is None, reason="needs a browser: chromium or google-chrome on the PATH"
)
SOURCES = sorted(PLAYGROUND.iterdir())
TEXT = "".join(token["text"] for round_ in speculative_rounds() for token in round_["tokens"])
WORDS = "#speculative .answer [role=button]"
PROVOKED = re.compile(r"Failed to load resource: .*(40[01]|ERR_FAILED)")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    served = FakeServer()
    yield served
    served.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROME, args=["--no-sandbox", "--headless"])
        yield launched
        launched.close()


class Visits:
    """Opens pages and notes what they complain of and which other hosts they ask."""

    def __init__(self, server: FakeServer, browser: Any) -> None:
        self._server = server
        self._browser = browser
        self._contexts: list[Any] = []
        self._complaints: list[str] = []

    def open(self, **settings: Any) -> Any:
        context = self._browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **settings})
        context.set_default_timeout(30_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", self._note)
        page.goto(self._server.page)
        page.get_by_text("Ready.").wait_for()
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        assert [complaint for complaint in self._complaints if not PROVOKED.search(complaint)] == []

    def _note(self, request: Any) -> None:
        if not request.url.startswith(self._server.origin + "/"):
            self._complaints.append(request.url)


@pytest.fixture
def open_page(server, browser) -> Iterator[Callable[..., Any]]:
    server.reset()
    visits = Visits(server, browser)
    yield visits.open
    visits.close()


@pytest.fixture(scope="module")
def shared_page(server, browser) -> Iterator[Any]:
    """One page with both answers, for tests that look and point."""
    server.reset()
    visits = Visits(server, browser)
    page = visits.open()
    run(page)
    finish(page)
    yield page
    visits.close()


@pytest.fixture
def answered(shared_page) -> Any:
    shared_page.emulate_media(color_scheme="light", reduced_motion="reduce")
    shared_page.keyboard.press("Escape")
    shared_page.mouse.move(0, 0)
    return shared_page


def run(page: Any, prompt: str = "Why a line?") -> None:
    page.fill("#prompt", prompt)
    page.get_by_role("button", name="Run", exact=True).click()


def finish(page: Any) -> None:
    page.locator("#verdict").wait_for(state="visible")


def word(page: Any, text: str) -> Any:
    return page.locator(WORDS).filter(has_text=text).first


@in_browser
def test_runs_plain_then_speculative_and_compares_them(server, open_page):
    page = open_page()
    run(page)
    finish(page)
    plain, speculative = server.requests
    assert plain["path"] == speculative["path"] == "/v1/chat/completions"
    assert plain["messages"] == [{"role": "user", "content": "Why a line?"}]
    assert plain["stream"]
    assert plain["stream_options"] == {"include_usage": True}
    assert plain["paceline"] == {"drafter": "none", "trace": True}
    assert speculative["paceline"] == {"drafter": "phrase", "num_speculative_tokens": "auto", "trace": True}
    assert page.locator("#plain .answer").text_content() == TEXT
    assert page.locator("#speculative .answer").text_content() == TEXT
    assert page.locator("#ratio").text_content() == "2.67"
    assert page.locator("#identity").text_content() == "Both texts are identical."
    assert page.locator("#plain [data-figure=acceptance]").text_content() == "1.00"
    assert page.locator("#speculative [data-figure=acceptance]").text_content() == "3.54"
    assert "2.67 times as fast; the texts are identical" in page.locator("#status").text_content()


@in_browser
def test_says_where_the_texts_part_and_never_reads_them_as_markup(server, open_page):
    server.changes_text = True
    page = open_page()
    run(page)
    finish(page)
    assert page.locator("#identity").text_content().endswith("first after “…faster than any of them alone”.")
    assert page.locator("#speculative .answer").text_content().endswith("alone<i>!</i>")
    assert page.locator("#speculative .answer i").count() == 0


@in_browser
def test_sends_what_the_controls_say(server, open_page):
    page = open_page()
    assert page.get_by_label("Risk budget, logits").is_hidden()
    page.get_by_label("Drafter", exact=True).select_option("prompt_lookup")
    page.get_by_label("Drafted nodes").fill("16")
    page.get_by_label("Verifier").select_option("budgeted")
    page.get_by_label("Budget preset").select_option("discovery")
    page.get_by_label("Risk budget, logits").fill("2.5")
    page.get_by_label("Most tokens").fill("32")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("at the same time").check()
    run(page)
    finish(page)
    body = next(body for body in server.requests if body["paceline"]["drafter"] != "none")
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (32, 0.7, 5)
    assert body["paceline"] == {
        "drafter": "prompt_lookup",
        "verifier": "budgeted",
        "num_speculative_tokens": 16,
        "relaxation": {"preset": "discovery", "risk_budget": 2.5},
        "trace": True,
    }
    assert page.get_by_text("Both ran at the same time").is_visible()


@in_browser
def test_a_model_without_a_chat_template_completes_the_prompt(server, open_page):
    page = open_page()
    page.get_by_label("Target model").select_option("base")
    assert page.get_by_label("Drafted nodes").input_value() == "8"
    run(page, "Once upon")
    finish(page)
    assert [body["path"] for body in server.requests] == ["/v1/completions"] * 2
    assert server.requests[1]["prompt"] == "Once upon"
    assert page.locator("#speculative .answer").text_content() == TEXT


@in_browser
def test_a_wrong_setting_is_not_sent(server, open_page):
    page = open_page()
    page.get_by_label("Drafted nodes").fill("many")
    run(page)
    assert page.evaluate("document.activeElement.id") == "nodes"
    assert server.requests == []


@in_browser
def test_words_show_where_they_came_from_by_colour_and_by_line(answered):
    page = answered
    looks = page.evaluate(
        """selector => {
          const looks = {};
          for (const word of document.querySelectorAll(selector)) {
            const style = getComputedStyle(word);
            looks[word.dataset.origin] = [style.color, style.textDecorationLine + style.textDecorationStyle];
          }
          return looks;
        }""",
        WORDS,
    )
    assert looks.keys() == {"phrase", "token", "relaxed", "target"}
    assert len({colour for colour, _ in looks.values()}) == len({line for _, line in looks.values()}) == 4
    assert word(page, "third").get_attribute("data-origin") == "relaxed"
    assert set(
        page.locator("#plain .answer [role=button]").evaluate_all("all => all.map(w => w.dataset.origin)")
    ) == {"target"}


@in_browser
def test_hovering_a_word_shows_its_round(answered):
    page = answered
    word(page, "third").hover()
    panel = page.get_by_role("complementary", name="Round 6")
    assert panel.get_by_text("9 nodes drafted, 3 accepted").is_visible()
    assert panel.locator(".facts dd").all_text_contents() == ["55%", "31%", "\u22121.17"]
    assert panel.locator(".choices .choice-text").all_text_contents() == ["·quarter", "·third", "·few"]
    assert panel.locator(".times dd").all_text_contents() == ["1.6 ms", "11.2 ms", "0.4 ms", "0.3 ms"]
    assert panel.get_by_role("heading", name="Time, 13.5 ms").is_visible()
    assert page.locator(f"{WORDS}[data-marked]").all_text_contents() == ["about", " a", "third", "less"]
    page.keyboard.press("Escape")
    assert page.get_by_role("heading", name="Round 6").count() == 0


@in_browser
def test_a_line_break_can_be_pointed_at_and_is_seen_then(answered):
    page = answered
    broken = page.locator(WORDS).and_(page.get_by_label("line break"))
    colour = "word => getComputedStyle(word, '::before').color"
    assert broken.evaluate(colour) == "rgba(0, 0, 0, 0)"
    broken.hover()
    assert page.get_by_role("complementary", name="Round 8").is_visible()
    assert broken.evaluate(colour) != "rgba(0, 0, 0, 0)"


@in_browser
def test_the_draft_tree_lists_accepted_and_rejected_branches(answered):
    page = answered
    word(page, "saves").hover()
    rows = page.locator("#round .tree li").evaluate_all(
        """rows => rows.map(row => [
          row.querySelector(':scope > .mark .unseen').textContent,
          ...[...row.querySelectorAll(':scope > .chain .node-text')].map(node => node.textContent)])"""
    )
    assert rows == [
        ["accepted: ", "in"],
        ["accepted: ", "a"],
        ["accepted: ", "line"],
        ["then: ", "saves"],
        ["rejected: ", "group"],
        ["rejected: ", "the", "wind"],
        ["rejected: ", "behind"],
    ]
    page.locator("#plain .answer [role=button]").nth(3).hover()
    assert page.get_by_text("Plain: nothing drafted").is_visible()


@in_browser
def test_the_keyboard_alone_reaches_every_word_and_its_round(open_page):
    page = open_page()
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+Enter")
    finish(page)
    page.get_by_text("Plain answer as running text").focus()
    page.keyboard.press("Tab")
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == "Riding"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == " a"
    assert page.get_by_role("heading", name="Round 1", exact=True).is_visible()
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "Round 1"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == " a"
    assert page.locator("#round[data-open]").count() == 0
    page.keyboard.press("ArrowDown")
    below = page.evaluate(
        "a => document.activeElement.getBoundingClientRect().top - a.getBoundingClientRect().top",
        word(page, " a").element_handle(),
    )
    assert 10 < below < 60
    page.keyboard.press("End")
    assert page.evaluate(focused) == "."
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == "Riding"
    assert page.locator(f"{WORDS}[tabindex='0']").count() == 1


@in_browser
def test_a_click_holds_the_round_while_the_mouse_moves_on(answered):
    page = answered
    word(page, "third").click()
    word(page, "Riding").hover()
    assert page.get_by_role("heading", name="Round 6").is_visible()
    page.get_by_role("button", name="Close").click()
    word(page, "saves").hover()
    assert page.get_by_role("heading", name="Round 1", exact=True).is_visible()


@in_browser
def test_stop_ends_the_request(server, open_page):
    page = open_page()
    run(page, "[slow]")
    page.locator("#plain .answer [role=button]").nth(2).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("status").get_by_text("Stopped.").wait_for()
    assert server.has_left.wait(30)
    assert len(server.requests) == 1
    assert page.locator("#plain .answer").text_content() == "Riding in a"
    assert page.locator("#verdict").is_hidden()
    assert page.locator("#error").is_hidden()
    run(page)
    finish(page)


@in_browser
@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("[refuse]", "unknown drafter 'x': <b>did you mean</b> 'y'?"),
        ("[error]", "the target ran out of memory"),
        ("[cut]", "The connection was lost before the answer was complete."),
    ],
)
def test_errors_are_one_clear_line(open_page, prompt, line):
    page = open_page()
    run(page, prompt)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.text_content() == line
    assert alert.locator("*").count() == 0
    run(page)
    finish(page)
    assert page.locator("#error").is_hidden()


@in_browser
def test_a_server_that_is_away_is_asked_again_by_the_next_run(open_page):
    page = open_page()
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    page.get_by_text("The server cannot be reached.").wait_for()
    page.unroute("**/v1/models")
    run(page)
    finish(page)


@in_browser
def test_a_key_is_asked_for_only_after_401_and_stays_in_memory(server, open_page):
    page = open_page()
    assert page.get_by_label("API key", exact=True).is_hidden()
    server.key = "secret"
    run(page)
    page.get_by_label("API key", exact=True).fill("secret")
    assert page.get_by_role("alert").text_content() == "this server needs an API key"
    page.keyboard.press("Enter")
    finish(page)
    assert server.keys[-1] == "Bearer secret"
    assert page.get_by_label("API key", exact=True).is_hidden()
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    page.reload()
    page.get_by_label("API key", exact=True).fill("secret")
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("Ready.").wait_for()


@in_browser
def test_fits_a_phone_and_keeps_the_tapped_word_in_sight(open_page):
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    run(page)
    finish(page)
    for text in ("Riding", "third", "faster"):
        word(page, text).tap()
        sheet = page.locator("#round").bounding_box()
        tapped = word(page, text).bounding_box()
        assert tapped["y"] + tapped["height"] <= sheet["y"] or tapped["y"] >= sheet["y"] + sheet["height"]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    boxes = [page.locator(selector).bounding_box() for selector in ("#plain", "#speculative")]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    page.get_by_role("button", name="Close").tap()
    assert page.locator("#round").is_hidden()


@in_browser
def test_text_has_contrast_in_light_and_in_dark(answered):
    word(answered, "third").click()
    papers = []
    for scheme in ("dark", "light"):
        answered.emulate_media(color_scheme=scheme)
        papers.append(answered.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert answered.evaluate(CONTRAST) == []
    assert papers[0] != papers[1]


CONTRAST = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = colour => {
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = channels(colour).map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
  };
  const weak = [];
  for (const node of document.querySelectorAll('body *')) {
    const hasText = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!hasText || !node.checkVisibility() || node.getAttribute('aria-disabled') === 'true') continue;
    const [a, b] = [luminance(getComputedStyle(node).color), luminance(paper(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push([node.className, node.textContent, ratio]);
  }
  return weak;
}"""


@in_browser
def test_structure_serves_assistive_technology(answered):
    page = answered
    word(page, "third").click()
    assert page.locator("h1").count() == 1
    for landmark in ("banner", "main", "complementary"):
        assert page.get_by_role(landmark).count() == 1
    for region in ("Plain", "Speculative", "Comparison", "Where a token came from"):
        assert page.get_by_role("region", name=region, exact=True).count() == 1
    assert page.get_by_role("status").get_attribute("aria-live") == "polite"
    assert page.locator(".answer[aria-live], .answer [aria-live]").count() == 0
    assert word(page, "third").get_attribute("aria-description") == "relaxed token, round 6"
    assert (
        page.evaluate(
            """() => {
          const faults = [];
          for (const field of document.querySelectorAll('input, select, textarea')) {
            if (field.labels.length !== 1) faults.push(`no label: ${field.id}`);
          }
          for (const button of document.querySelectorAll('button, [role=button]')) {
            if (!(button.getAttribute('aria-label') ?? button.textContent).trim()) faults.push('no name');
          }
          for (const name of ['aria-labelledby', 'aria-describedby', 'for']) {
            for (const node of document.querySelectorAll(`[${name}]`)) {
              if (!document.getElementById(node.getAttribute(name))) faults.push(`${name} of ${node.id}`);
            }
          }
          const ids = [...document.querySelectorAll('[id]')].map(node => node.id);
          if (new Set(ids).size !== ids.length) faults.push('an id twice');
          let level = 0;
          for (const heading of document.querySelectorAll('h1, h2, h3, h4')) {
            if (heading.tagName[1] > level + 1) faults.push(`skipped to ${heading.textContent}`);
            level = Number(heading.tagName[1]);
          }
          if (!document.documentElement.lang) faults.push('no language');
          return faults;
        }"""
        )
        == []
    )


@in_browser
def test_reduced_motion_is_respected(answered):
    durations = []
    for motion in ("no-preference", "reduce"):
        answered.emulate_media(reduced_motion=motion)
        durations.append(
            word(answered, "third").evaluate("word => getComputedStyle(word).transitionDuration")
        )
    assert durations == ["0.12s", "0s"]


@in_browser
@pytest.mark.parametrize(
    ("rounds", "pieces"),
    [
        ([(" a b", [" a", " b"])], [(" a", 0), (" b", 1)]),
        ([("Hi you", [" Hi", " you"])], [("Hi", 0), (" you", 1)]),
        ([("", ["\ufffd"]), ("🙂 x", ["\ufffd", " x"])], [("🙂", 0), (" x", 2)]),
        ([(" ca", [" cat", "!"]), ("t!", [])], [(" ca", 0), ("t", 0), ("!", 1)]),
        ([(" a", [" a", " stop", " gone"])], [(" a", 0)]),
        ([(" other words", [" a"]), (" b", [" b"])], [(" other words", 0), (" b", 1)]),
        ([("no trace", [])], [("no trace", None)]),
        ([("\n\n", ["\n", "\n"])], [("\n", 0), ("\n", 1)]),
    ],
    ids=[
        "exact",
        "dropped blank",
        "split character",
        "held back",
        "cut",
        "unlike",
        "no trace",
        "line breaks",
    ],
)
def test_every_letter_of_the_deltas_goes_to_one_token(shared_page, rounds, pieces):
    number = iter(range(99))
    sent = [
        (delta, {"tokens": [{"text": text, "id": next(number)} for text in texts]}) for delta, texts in rounds
    ]
    shared = shared_page.evaluate(
        """async sent => {
          const { TokenQueue } = await import('/playground/tokens.js');
          const queue = new TokenQueue();
          return sent.flatMap(([delta, round]) => queue.share(delta, round))
            .map(({ text, token }) => [text, token ? token.id : null]);
        }""",
        sent,
    )
    assert [tuple(piece) for piece in shared] == pieces
    assert "".join(text for text, _ in pieces) == "".join(delta for delta, _ in rounds)


def test_the_page_holds_nothing_that_a_strict_policy_forbids():
    page = (PLAYGROUND / "index.html").read_text("utf-8")
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", page)
    for path in SOURCES:
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.\w|@import|@font-face", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Storage\b", text), (
            path.name
        )


def test_every_module_is_short():
    modules = [path for path in SOURCES if path.suffix == ".js"]
    assert len(modules) > 5
    for path in modules:
        assert len(path.read_text("utf-8").splitlines()) < 300, path.name
