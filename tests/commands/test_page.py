"""The server's page and the page of --show-trees, in headless Chromium."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the extra test has playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from jaxspec.commands.generate.tree_page import tree_page
from jaxspec.engine.generation import RoundTree, Timings
from jaxspec.llm.completion import Completion
from tests.helpers.page_stub import RECORDED, Stub, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH: install it"),
]
ROUNDS = [tree for chunk in RECORDED["speculative"] for tree in chunk["speculation"]["trees"]]
WIDE, PHONE = (1280, 900), (390, 844)
# A folder to keep screenshots in; they are taken and dropped otherwise.
SCREENSHOTS = os.environ.get("JAXSPEC_SCREENSHOTS")

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root, as in containers, needs --no-sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages; afterwards none of them may have written an error to its console."""
    errors: list[str] = []
    contexts = []

    def open_page(url: str, size: tuple[int, int] = WIDE, scheme: Any = "light") -> Page:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((url, "data:"))
                else errors.append(f"asked {request.url}")
            ),
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def stub() -> Iterator[tuple[Stub, str]]:
    stub = Stub()
    with served(stub) as url:
        yield stub, url


def screenshot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)
    else:
        page.screenshot()


def no_sideways_scrolling(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_completion_streams_and_its_rounds_can_be_stepped_through(
    stub: tuple[Stub, str], open_page: Open
):
    server, url = stub
    page = open_page(url)
    expect(page.locator("#model")).to_have_text("python-lm")
    page.locator("#input").fill(RECORDED["prompt"])
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".count")).to_have_text(f"{len(ROUNDS)} / {len(ROUNDS)}")
    expect(page.locator("#send")).to_be_enabled()
    [request] = server.requests
    assert request["return_speculation"] is True and request["stream"] is True
    assert (request["prompt"], request["model"]) == (RECORDED["prompt"], "python-lm")
    assert "plain" not in request
    text = page.locator("#answers .text")
    assert text.text_content() == RECORDED["text"]
    drafted = [node for tree in ROUNDS for node in tree["path"][1:][: tree["committed"]]]
    expect(text.locator(".accepted")).to_have_count(len(drafted))
    expect(text.locator(".bonus")).to_have_count(sum(map(has_bonus, ROUNDS)))
    assert float(page.locator("#figures dd").first.text_content() or "") > 0

    page.locator("h1").click()  # arrow keys step unless one is typing
    for key, shown in (("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)):
        page.keyboard.press(key)
        check_picture(page, shown)
    page.get_by_role("button", name="Next round").click()
    check_picture(page, 3)
    text.locator(".bonus").nth(4).click()
    check_picture(page, 5)
    expect(page.get_by_role("button", name="Last round")).to_be_enabled()
    page.keyboard.press("End")
    check_picture(page, len(ROUNDS))
    expect(page.get_by_role("button", name="Last round")).to_be_disabled()


def has_bonus(tree: dict[str, Any]) -> bool:
    """Whether the text did not end before it."""
    return tree["committed"] == len(tree["path"])


def check_picture(page: Page, number: int) -> None:
    """Round ``number``, from 1, is drawn, and its tokens are marked in the text."""
    expect(page.locator(".count")).to_have_text(f"{number} / {len(ROUNDS)}")
    tree = ROUNDS[number - 1]
    picture = page.locator("svg.tree")
    expect(picture.locator(".node.root")).to_have_count(1)
    committed = min(tree["committed"], len(tree["path"]) - 1)
    expect(picture.locator(".node.accepted")).to_have_count(committed)
    rejected = len(tree["nodes"]) - len(tree["path"])
    expect(picture.locator(".node.rejected")).to_have_count(rejected)
    expect(picture.locator(".node.bonus")).to_have_count(int(has_bonus(tree)))
    marked = page.locator("#answers .selected")
    rounds = marked.evaluate_all("spans => spans.map((span) => span.dataset.round)")
    assert set(rounds) == {str(number - 1)}


def test_what_the_token_limit_has_cut_is_said(stub: tuple[Stub, str], open_page: Open):
    page = open_page(stub[1])
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#send")).to_be_enabled()
    last, whole = ROUNDS[-1], ROUNDS[-2]
    cut = len(last["path"]) - last["committed"]
    assert cut and has_bonus(whole), "the recorded text ends otherwise"
    expect(page.locator(".words")).to_contain_text(f", {cut} cut by the token limit")
    expect(page.locator("svg.tree .node.cut")).to_have_count(cut)
    expect(page.locator("#legend .cut")).to_contain_text("cut by the token limit")
    page.get_by_role("button", name="Previous round").click()
    expect(page.locator(".words")).not_to_contain_text("cut")


def test_acceptance_by_depth_is_a_picture(stub: tuple[Stub, str], open_page: Open):
    page = open_page(stub[1])
    expect(page.locator("svg.depths")).to_have_count(0)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#send")).to_be_enabled()
    depths = max(len(tree["path"]) - 1 for tree in ROUNDS)
    picture = page.get_by_role("img", name="accepted by depth")
    expect(picture.locator("rect")).to_have_count(depths)
    share = sum(len(tree["path"]) > 1 for tree in ROUNDS) / len(ROUNDS)
    expect(picture).to_have_attribute("aria-label", re.compile(f"1: {100 * share:.0f}%"))
    assert page.title() == "python-lm · jaxspec"


WRAPPED = """() => [...document.querySelectorAll("label, legend, dt, li, button, h1, h2, .who")]
    .filter((element) => {
        const range = document.createRange();
        range.selectNodeContents(element);
        const words = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
        const tops = [];
        while (words.nextNode()) {
            if (!words.currentNode.textContent.trim()) continue;
            range.selectNodeContents(words.currentNode);
            tops.push(...[...range.getClientRects()].map((rect) => Math.round(rect.top)));
        }
        return new Set(tops).size > 1 || element.scrollWidth > element.clientWidth + 1;
    })
    .map((element) => element.textContent.trim())"""


IN_ROWS = """() => [...document.querySelectorAll("fieldset, .fields, .actions")]
    .filter((element) => {
        const bottoms = [...element.querySelectorAll("label, button")]
            .map((child) => Math.round(child.getBoundingClientRect().bottom));
        return new Set(bottoms).size > 1;
    })
    .map((element) => element.textContent.trim())"""


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_no_label_is_wrapped_or_cut_off(
    size: tuple[int, int], stub: tuple[Stub, str], open_page: Open
):
    page = open_page(stub[1], size)
    page.get_by_label("both, and compare").check()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#verdict")).to_be_visible()
    assert page.evaluate(WRAPPED) == []
    assert size == PHONE or page.evaluate(IN_ROWS) == []
    assert no_sideways_scrolling(page)


def test_plain_decoding_gives_the_same_text(stub: tuple[Stub, str], open_page: Open):
    server, url = stub
    page = open_page(url)
    page.get_by_label("both, and compare").check()
    page.get_by_role("button", name="Generate").click()
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text("Plain decoding gives the same text")
    expect(verdict).to_contain_text(f"in {len(ROUNDS)} rounds")
    assert [request.get("plain") for request in server.requests] == [None, True]
    one, other = (dict(request, plain=None) for request in server.requests)
    assert one == other
    figures = page.locator("#figures")
    expect(figures.locator("div", has_text="speed-up over plain")).to_contain_text("×")
    screenshot(page, "page-light")


def test_a_chat_remembers(stub: tuple[Stub, str], open_page: Open):
    server, url = stub
    page = open_page(url, PHONE, "dark")
    page.get_by_label("an answer in a chat").check()
    for text in ("first", "second"):
        page.locator("#input").fill(text)
        page.locator("#input").press("Enter")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#input")).to_have_value("")
    roles = [[message["role"] for message in one["messages"]] for one in server.requests]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert server.requests[1]["messages"][1]["content"] == RECORDED["text"]
    assert no_sideways_scrolling(page)
    screenshot(page, "page-dark-phone")
    page.locator("#answers .bonus").first.click()  # of the first answer
    expect(page.locator(".count")).to_have_text(f"1 / {len(ROUNDS)}")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#answers")).to_be_empty()


def test_what_goes_wrong_is_said(open_page: Open, browser: Browser):
    """Chromium writes each refused request to the console, so this page is not checked for it."""
    stub = Stub(api_key="secret")
    with served(stub) as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#model")).to_contain_text("the server needs an API key")
        page.get_by_label("API key").fill("secret")
        page.locator("#input").fill("too long")
        expect(page.locator("#model")).to_have_text("python-lm")
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_have_text("400: the prompt is too long")
        page.locator("#input").fill("more")
        page.get_by_role("button", name="Generate").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#send")).to_be_enabled()
        expect(page.get_by_role("alert")).to_be_hidden()
        page.close()


def test_text_of_a_model_is_never_markup(tmp_path: Path, open_page: Open):
    """Neither in the text nor in a tree, though it looks like the page's own."""
    words = ["<b>x</b>", "</script><script>document.title='bad'</script>", "/* TREE */", "é\n", "."]

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids)

    trees = [RoundTree((0, 1, 2), (-1, 0, 0), (None, 0.7, 0.001), (0, 1), 3, 2)]
    completion = Completion(
        text="".join(words[token] for token in (0, 1, 3)),
        token_ids=[0, 1, 3],
        prompt_token_ids=[2, 4],
        finish_reason="length",
        error=None,
        seed=0,
        num_rounds=1,
        num_drafted=2,
        acceptance_length=2.0,
        acceptance_by_depth=[1.0],
        timings=Timings(0.0, 0.0, 0.0, 0.0),
        trees=trees,
    )
    path = tmp_path / "trees.html"
    html = tree_page(completion, decode, "a model")
    path.write_text(html, encoding="utf-8")
    page = open_page(path.as_uri())
    assert page.title() == "jaxspec: rounds of a text"
    assert page.locator("#text").text_content() == completion.text
    assert page.locator("#text .accepted").text_content() == words[1]
    expect(page.locator("svg.tree .node")).to_have_count(4)
    expect(page.locator("svg.tree .node.rejected .chance")).to_have_text("0.1%")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_page_can_be_read(
    size: tuple[int, int], scheme: str, stub: tuple[Stub, str], open_page: Open
):
    page = open_page(stub[1], size, scheme)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#answers .accepted").nth(6).click()
    assert no_sideways_scrolling(page)
    assert page.evaluate("document.querySelector('.picture').scrollWidth <= innerWidth")
    screenshot(page, f"page-{scheme}-{size[0]}")
