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
    page.get_by_label("Search conversations").wait_for()
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
    figures = page.locator(".answer small").inner_text()
    assert re.search(r"\d+ tokens · [\d.]+/s · first after", figures)
    page.locator("nav [aria-current=true]").get_by_text("What is the KV cache?").wait_for()


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
    page.locator("article.question").last.get_by_role("button", name="Edit").press("Enter")
    assert page.get_by_label("Your question").input_value() == "What is paging?"
    ask(page, "What is quantization?")
    wait_for_end(page)
    questions = page.locator("article.question .text").all_inner_texts()
    assert questions == ["What is quantization?"]


def test_an_edit_that_is_given_up_leaves_the_conversation(page: Any) -> None:
    ask(page, "What is paging?")
    wait_for_end(page)
    page.locator("article.question").last.get_by_role("button", name="Edit").press("Enter")
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


def test_no_reload_loses_what_was_said_whenever_it_comes(page: Any) -> None:
    for wait_s in (0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.1):
        page.get_by_role("button", name="New conversation").click()
        first, second = f"What was {wait_s} about?", f"And after {wait_s}?"
        ask(page, first)
        time.sleep(wait_s)
        page.reload()
        page.locator("article.question").get_by_text(first, exact=True).wait_for()
        ask(page, second)
        time.sleep(wait_s)
        page.reload()
        until(page, "document.querySelectorAll('article.question').length === 2")
        until(page, "location.hash.startsWith('#c=')")
        page.reload()  # now from what the server has
        until(page, "document.querySelectorAll('article.question').length === 2")
        assert page.locator("article.question .text").all_inner_texts() == [first, second], wait_s
        assert page.locator("#warning").is_hidden(), page.locator("#warning").inner_text()
        # It is one conversation, not several.
        page.get_by_label("Search conversations").fill(first)
        until(
            page, f"[...document.querySelectorAll('nav .open')].every(e => e.title === '{first}')"
        )
        assert page.locator("nav .open").count() == 1, wait_s
        page.get_by_label("Search conversations").fill("")
        page.locator("nav .open").nth(1 if wait_s else 0).wait_for()


def test_a_second_window_goes_on_beside_the_first_and_nothing_is_lost(
    browser: Any, page: Any, opened: tuple[Server, str]
) -> None:
    ask(page, "What is batching?")
    wait_for_end(page)
    until(page, "location.hash.startsWith('#c=')")
    other, address = browser.new_page(), page.url
    other.goto(address)
    last_answer(other).wait_for()
    ask(other, "And why?")
    wait_for_end(other)
    ask(page, "Something else?")
    page.get_by_text("This conversation was continued in another window").wait_for()
    wait_for_end(page)
    until(page, f"location.href !== '{address}'")
    for window, last in ((page, "Something else?"), (other, "And why?")):
        window.reload()
        window.get_by_text(last, exact=True).wait_for()
        texts = window.locator("article.question .text").all_inner_texts()
        assert texts == ["What is batching?", last]


def test_a_conversation_is_renamed_found_and_deleted(page: Any) -> None:
    ask(page, "Where is Ouagadougou?")
    wait_for_end(page)
    row = page.locator("nav li", has_text="Where is Ouagadougou?")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the conversation").fill("Geography")
    page.keyboard.press("Enter")
    row = page.locator("nav li", has_text="Geography")
    row.wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("ouaga")
    until(page, "document.querySelectorAll('nav .open').length === 1")
    row.hover()
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    row.hover()
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("No conversation contains this.").wait_for()
    assert page.locator("article").count() == 0


def test_a_conversation_with_a_file_is_called_by_its_question(page: Any) -> None:
    files = [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"Once upon a time"}]
    page.locator("#chosen").set_input_files(files)
    page.get_by_role("button", name="Remove a.txt").wait_for()
    ask(page, "Who was it?")
    wait_for_end(page)
    page.locator("nav [aria-current]").get_by_text("Who was it?", exact=True).wait_for()
    shown = page.locator("article.question .text").inner_text()
    assert shown == "Who was it?\n\na.txt:\n\nOnce upon a time"


def test_the_settings_are_those_of_the_model(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Most tokens").get_attribute("placeholder") == "2,048"
    assert page.get_by_label("Thinking").is_hidden()  # it does not think


def test_a_token_that_does_not_fit_replaces_no_other(
    browser: Any, page: Any, opened: tuple[Server, str]
) -> None:
    server, token = opened
    other = browser.new_page()
    other.goto(f"{server.url}/#token=bad")
    other.get_by_text("The token in the address is not this server's").wait_for()
    assert "token" not in other.url
    assert other.evaluate("localStorage.getItem('localllm-token')") == token
    other.evaluate("location.hash = 'token=worse'")  # the page is open already
    until(other, "location.hash === ''")
    other.get_by_role("button", name="New conversation").click()
    assert other.get_by_label("Search conversations").is_visible()
    assert other.evaluate("localStorage.getItem('localllm-token')") == token


def test_code_is_coloured(page: Any) -> None:
    answer_with(
        page, '```python\ndef twice(x):\n    return "2" * x  # <b>\n```\n\n```nosuch\na\n```\n'
    )
    ask(page, "Go on")
    wait_for_end(page)
    code = last_answer(page).locator("code").first
    until(page, "document.querySelectorAll('.hljs-keyword').length === 2")
    assert code.inner_text() == 'def twice(x):\n    return "2" * x  # <b>'
    assert code.locator(".hljs-comment").inner_text() == "# <b>"
    assert last_answer(page).locator("code").nth(1).inner_text() == "a"


def answer_with(page: Any, text: str) -> None:
    """Have every question answered with this."""

    def say(route: Any) -> None:
        events = [
            {"type": "message_start"},
            {"type": "content_block_delta", "delta": {"text": text}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
        ]
        body = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/messages", say)


@pytest.mark.parametrize(
    "text", ["[" * 65536, ">" * 4000, "x" * 100_000, "> - " * 10_000], ids=lambda text: text[:4]
)
def test_an_answer_of_any_form_can_be_opened_again(page: Any, text: str) -> None:
    answer_with(page, text)
    ask(page, f"What is {text[:4]}?")
    wait_for_end(page)
    assert last_answer(page).locator(".markdown").inner_text().count(text[0]) > 3000
    until(page, "location.hash.startsWith('#c=')")
    page.reload()
    last_answer(page).locator(".markdown").get_by_text(text[:4]).wait_for()
    page.locator("nav .open").first.wait_for()
    page.get_by_role("button", name="New conversation").click()


# Draws texts in steps, as they would come, and tells how long each drawing took, layout included.
DRAW = """async ([texts, numSteps]) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const told = [];
  for (const text of texts) {
    const element = document.createElement("div"), view = new MarkdownView(element), times = [];
    document.querySelector("#log").replaceChildren(element);
    for (let step = 1; step <= numSteps; step += 1) {
      const began = performance.now();
      view.show(text.slice(0, Math.ceil(text.length * step / numSteps)), step === numSteps);
      element.getBoundingClientRect();
      times.push(performance.now() - began);
      await new Promise((resolve) => setTimeout(resolve));
    }
    let deepest = 0;
    for (let at = element, depth = 0; at; at = at.lastElementChild, depth += 1) deepest = depth;
    told.push({ worst: Math.max(...times), html: element.innerHTML, deepest });
  }
  return told;
}"""
PLAIN = (
    "The *quick* `fox` **jumps** [here](http://a.b/c).\n\n- one\n- two\n\n|a|b|\n|-|-|\n|1|2|\n\n"
)
NUM_CHARS = 65536
REPEATED = (
    "[", "![", "[a](", "*", "**a ", "*a_ ", "a**b", "`", "` `` ", "<", "&", "\\", "~~a", "|", "(",
    "http://", "http://a.b/(", "![[]()", "[[]", "*a [b ", "[a][", "- ", "> ", "1. ", "- a\n",
    "> a\n", "a|b\n-|-\n", "[a]: b\n", "a\n=\n", "_ *", "- > ", "a\n\n", "\t", "é", "x", "x ",
)  # fmt: skip
OTHERS = {
    "a table of 10,000 cells": "|a" * 10 + "\n" + "|-" * 10 + "\n" + ("|b" * 10 + "\n") * 999,
    "lists within lists": "".join("  " * level + "- a\n" for level in range(250)),
    "emphasis within emphasis": "*a **b " * 5000 + "** *" * 5000,
    "much code": "```python\n" + "x = 'a' + 1\n" * 6000,
    "code of one word": "```java\n" + "a" * NUM_CHARS,
}


@pytest.fixture
def bare(browser: Any, opened: tuple[Server, str]) -> Any:
    """A page into which a test may import modules."""
    context = browser.browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(opened[0].url)
    until(page, "document.title.includes('pocket')")
    return page


def test_no_text_takes_much_longer_to_draw_than_any_other(bare: Any) -> None:
    usual = (PLAIN * NUM_CHARS)[:NUM_CHARS]
    names = [*REPEATED, *OTHERS]
    texts = [(each * NUM_CHARS)[:NUM_CHARS] for each in REPEATED] + list(OTHERS.values())
    # The first one warms the page up.
    _, first, *drawn, last = bare.evaluate(DRAW, [[usual, usual, *texts, usual], 16])
    bound = 20 * max(first["worst"], last["worst"])
    slow = {n: d["worst"] for n, d in zip(names, drawn, strict=True) if d["worst"] > bound}
    assert not slow, (slow, first["worst"], last["worst"])
    assert max(each["deepest"] for each in drawn) < 150


def test_what_is_drawn_in_steps_is_what_is_drawn_at_once(bare: Any) -> None:
    texts = [
        PLAIN * 3,
        "- a\n\n  b\n- c\n\n    code\n\nd\n===\n\n> e\nf\n\n1. g\n2. h\n\n   i",
        "```py\na\n\nb\n```\nc\n~~~\nd",
        "[a] and [b]\n\n- [a]\n\n[a]: http://a.b/ 'x'\n[b]: mailto:c@d.e",
        "a\r\nb\r\n\r\n| c |\r\n|---|\r\n| d |\r\n\r\ne",
        "# a\n## b\n---\n***\ntext  \nhard\n\n\n    indented\n\n\n    more\n",
    ]
    whole = bare.evaluate(DRAW, [texts, 1])
    for num_steps in (7, 50, 200):
        stepped = bare.evaluate(DRAW, [texts, num_steps])
        assert [each["html"] for each in stepped] == [each["html"] for each in whole]


def test_a_hostile_answer_does_nothing(page: Any) -> None:
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))

    answer_with(page, HOSTILE)
    ask(page, "Go on")
    wait_for_end(page)
    page.wait_for_timeout(300)
    answer = last_answer(page)
    assert "taken" not in page.title()
    assert not dialogs
    assert not [url for url in asked if "elsewhere" in url]
    assert answer.locator("script, img, iframe").count() == 0
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
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
