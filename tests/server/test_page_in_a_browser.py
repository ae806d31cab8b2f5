"""The page in a real browser: `pip install playwright`, a Chromium on the path, and
`pytest -m browser`.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server.conftest import Server

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = """<script>document.title = "taken"</script>
<img src=x onerror="document.title = 'taken'">
![look](http://elsewhere.example/seen.png)
[click](javascript:document.title='taken') and [this](http://elsewhere.example/)

| a | b |
|---|---|
| <b>1</b> | `2` |

```html
<script>document.title = "taken"</script>
```
"""


@pytest.fixture
def browser(opened: tuple[Server, str]) -> Iterator[Any]:
    """A context with a page in it; every address that it asks for is noted in `asked`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = chromium.new_context()
        context.set_default_timeout(20_000)
        yield context
        chromium.close()


@pytest.fixture
def page(browser: Any, opened: tuple[Server, str]) -> Any:
    page = browser.new_page()
    server, token = opened
    page.goto(f"{server.url}/#token={token}")
    until(page, "document.title.includes('pocket')")
    return page


def until(page: Any, expression: str) -> None:
    """Wait for it; not by the page's own timers, since its policy forbids to run text."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.02)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_label("Your question").press("Enter")


def wait_for_end(page: Any) -> None:
    page.get_by_role("status").get_by_text(re.compile("complete|Stopped|Error")).wait_for()


def last_answer(page: Any) -> Any:
    return page.locator("article.answer").last


def test_a_question_is_answered_with_figures_and_is_there_after_a_reload(page: Any) -> None:
    ask(page, "What is the KV cache?")
    wait_for_end(page)
    text = last_answer(page).locator(".markdown").inner_text()
    assert "keys and values" in text
    assert re.search(r"\d+ tokens · [\d.]+/s · first after", last_answer(page).inner_text())
    assert "token" not in page.url  # it is not left in the address
    until(page, "location.hash.startsWith('#c=')")
    page.reload()
    last_answer(page).get_by_text("keys and values").first.wait_for()
    assert last_answer(page).locator(".markdown").inner_text() == text
    assert page.locator("nav [aria-current=true]").inner_text() == "What is the KV cache?"


def test_an_answer_can_be_stopped_continued_and_regenerated_by_keyboard(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    ask(page, "Tell me a long story about a king and his three sons.")
    until(page, "document.querySelector('.answer .markdown')?.innerText.length > 40")
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    begun = last_answer(page).locator(".markdown").inner_text()
    last_answer(page).get_by_role("button", name="Continue").press("Enter")
    wait_for_end(page)
    whole = last_answer(page).locator(".markdown").inner_text()
    assert whole.startswith(begun[:30])
    assert len(whole) >= len(begun)
    last_answer(page).get_by_role("button", name="Regenerate").press("Enter")
    until(page, "document.querySelector('#stop').hidden === false")
    wait_for_end(page)
    assert last_answer(page).locator(".markdown").inner_text()


def test_an_edited_question_takes_the_place_of_the_old_one(page: Any) -> None:
    ask(page, "What is paging?")
    wait_for_end(page)
    page.locator("article.question").last.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Your question").input_value() == "What is paging?"
    ask(page, "What is quantization?")
    wait_for_end(page)
    questions = page.locator("article.question .text").all_inner_texts()
    assert questions == ["What is quantization?"]


def test_an_edit_that_is_given_up_leaves_the_conversation(page: Any) -> None:
    ask(page, "What is paging?")
    wait_for_end(page)
    page.locator("article.question").last.get_by_role("button", name="Edit").click()
    until(page, "document.querySelector('article') === null")
    page.keyboard.press("Escape")
    assert page.locator("article.question .text").all_inner_texts() == ["What is paging?"]
    assert last_answer(page).locator(".markdown").inner_text()
    assert page.get_by_label("Your question").input_value() == ""


def test_a_question_that_failed_does_not_fail_the_next_one(page: Any) -> None:
    ask(page, "a b c " * 3000)
    page.get_by_text("prompt is too long").wait_for()
    ask(page, "What is paging?")
    page.get_by_text("The answer is complete.").wait_for()
    assert last_answer(page).locator(".markdown").inner_text()


def test_settings_out_of_their_range_are_not_sent(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("-3")
    ask(page, "What is paging?")
    assert page.locator("article").count() == 0
    assert page.get_by_label("Your question").input_value() == "What is paging?"


def test_what_was_said_before_a_reload_is_kept_and_can_be_continued(page: Any) -> None:
    ask(page, "Tell me a long story about a king and his three sons.")
    until(page, "document.querySelector('.answer .markdown')?.innerText.length > 60")
    until(page, "location.hash.startsWith('#c=')")
    page.reload()
    last_answer(page).get_by_role("button", name="Continue").wait_for()
    assert len(last_answer(page).locator(".markdown").inner_text()) > 20


def test_a_second_window_sees_the_conversation_and_does_not_overwrite_it(
    browser: Any, page: Any, opened: tuple[Server, str]
) -> None:
    ask(page, "What is batching?")
    wait_for_end(page)
    until(page, "location.hash.startsWith('#c=')")
    other = browser.new_page()
    other.goto(page.url)
    last_answer(other).wait_for()
    ask(other, "And why?")
    wait_for_end(other)
    ask(page, "Something else?")
    page.get_by_text("Another window has continued").wait_for()
    page.reload()
    page.locator("article.question").nth(1).wait_for()
    assert page.locator("article.question .text").all_inner_texts()[1] == "And why?"


def test_a_hostile_answer_does_nothing(page: Any) -> None:
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))

    def say(route: Any) -> None:
        events = [
            {"type": "message_start"},
            {"type": "content_block_delta", "delta": {"text": HOSTILE}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
        ]
        body = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/messages", say)
    ask(page, "Go on")
    wait_for_end(page)
    page.wait_for_timeout(300)
    answer = last_answer(page)
    assert "taken" not in page.title()
    assert not dialogs
    assert not [url for url in asked if "elsewhere" in url]
    assert answer.locator("script, img, iframe").count() == 0
    assert answer.locator(".markdown").inner_text().startswith("<script>")
    assert answer.get_by_text("[image: look]").count() == 1
    assert [a.get_attribute("href") for a in answer.locator("a").all()] == [
        "http://elsewhere.example/"
    ]
    assert answer.locator("td").first.inner_text() == "<b>1</b>"
    answer.get_by_role("button", name="Copy html code").click()


def test_a_page_of_another_origin_gets_nothing(browser: Any, opened: tuple[Server, str]) -> None:
    page = browser.new_page()
    html = {"content_type": "text/html", "body": "<title>other</title>"}
    page.route("http://elsewhere.example/", lambda route: route.fulfill(status=200, **html))
    page.goto("http://elsewhere.example/")
    url = opened[0].url
    script = f"""async () => {{
      const tries = [
        fetch("{url}/page/conversations"),
        fetch("{url}/v1/messages", {{method: "POST", body: "{{}}",
          headers: {{"content-type": "application/json"}}}}),
        fetch("{url}/v1/models"),
      ];
      return (await Promise.allSettled(tries)).map((each) => each.status);
    }}"""
    assert page.evaluate(script) == ["rejected"] * 3
    page.set_content(f'<iframe src="{url}/"></iframe>')
    page.wait_for_timeout(500)
    framed = page.frames[-1]
    assert framed.title() != "localllm · pocket"


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    ask(page, "What is the KV cache?")
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Conversations").click()
    page.locator("nav").get_by_text("What is the KV cache?").first.wait_for()
