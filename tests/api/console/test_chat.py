"""The playground as a chat, in a real Chromium: Markdown, turns written anew, conversations that stay."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import byte_tokenizer
from planted_console import NamedAdapter, planted_console
from playwright.sync_api import Page, expect

from personae.engine.sequence import SequenceLog

ANSWER = """# Soup

1. **Cut** the `leek`
2. [Cook](https://example.org/cook) it, not [so](javascript:window.broken=true)

| part | grams |
|---|---|
| leek | 200 |

```python
print("<b>hot</b>")
```

> - [x] *done*

<img src=x onerror="window.broken=true"> ![picture](https://example.org/soup.png)
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("chat")
    engine = NamedAdapter(answer=ANSWER)
    engine.max_model_len = 8192
    with planted_console(folder / "data", engine, folder / "runs") as url:
        yield url


def say(page: Page, text: str, answers: int) -> None:
    """Send it, and wait until the conversation has so many answers and the last one is complete."""
    page.get_by_label("Most tokens").fill("2000")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".assistant .summary")).to_have_count(answers)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_answer_is_drawn_as_markdown_and_none_of_it_becomes_html(page: Page, chat: str) -> None:
    page.goto(chat)
    say(page, "How is soup made?", 1)
    answer = page.locator(".assistant .markdown")
    expect(answer.locator(".heading")).to_have_text("Soup")
    expect(answer.locator("ol li strong")).to_have_text("Cut")
    expect(answer.locator("ol li code")).to_have_text("leek")
    expect(answer.locator("td")).to_have_text(["leek", "200"])
    expect(answer.locator("pre code")).to_have_text('print("<b>hot</b>")')
    expect(answer.locator("blockquote em")).to_have_text("done")
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert links == ["https://example.org/cook", "https://example.org/soup.png"]
    assert page.locator(".talk img, .talk b").count() == 0
    expect(answer).to_contain_text('<img src=x onerror="window.broken=true">')
    expect(answer).to_contain_text("[so](javascript:window.broken=true)")
    assert page.evaluate("window.broken") is None


def test_text_that_is_nested_without_end_or_very_long_is_shown(page: Page, chat: str) -> None:
    page.goto(chat)
    drawn = """async (text) => {
        const { html, render } = await import("/console/preact-htm.js");
        const { Markdown } = await import("/console/markdown.js");
        const place = document.createElement("div");
        render(html`<${Markdown} text=${text} />`, place);
        return place.textContent.length;
    }"""
    for text in (">" * 5000 + " deep", "- " * 3000 + "deep", "*" * 5000 + " x", "[" * 5000, "word " * 50_000):
        assert page.evaluate(drawn, text) >= 4


def test_a_turn_is_written_anew_and_an_answer_is_made_again(page: Page, chat: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(chat)
    say(page, "first", 1)
    say(page, "second", 2)
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("first")
    expect(page.locator(".turn")).to_have_count(0)
    say(page, "first, better", 1)
    expect(page.locator(".user .text")).to_have_text(["first, better"])
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".assistant .summary")).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(2)
    page.locator(".turn.assistant").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


def test_conversations_stay_in_the_browser_until_they_are_deleted(page: Page, chat: str) -> None:
    page.goto(chat)
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "a talk", 1)
    page.get_by_role("button", name="New", exact=True).click()
    say(page, "another", 1)
    page.reload()
    page.get_by_text("Conversations in this browser").click()
    titles = page.locator(".conversations .title")
    expect(titles).to_have_text(["another", "a talk"])
    with page.expect_download() as found:
        page.get_by_role("button", name="Export a talk").click()
    exported = json.loads(Path(found.value.path()).read_text(encoding="utf-8"))
    (column,) = exported["columns"]
    assert [message["content"] for message in column["messages"]] == ["a talk", ANSWER]
    assert exported["system"] == "Be brief."
    titles.last.click()
    expect(page.locator(".assistant .heading")).to_have_text("Soup")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    say(page, "more", 1)  # the kept answer has no figures
    expect(titles).to_have_text(["a talk", "another"])
    page.get_by_role("button", name="Delete another").click()
    page.reload()
    page.get_by_text("Conversations in this browser").click()
    expect(titles).to_have_text(["a talk"])


def test_a_conversation_is_kept_before_the_page_says_that_its_answer_ended(page: Page, chat: str) -> None:
    page.goto(chat)
    page.evaluate("""() => {
        const kept = () => localStorage.getItem("personae.conversations")?.includes("# Soup") ?? false;
        let busy = false;
        new MutationObserver(() => {
            const named = [...document.querySelectorAll(".prompt button")].map((one) => one.textContent);
            if (busy && named.includes("Send")) window.keptAtTheEnd = kept();
            busy = named.includes("Stop");
        }).observe(document.body, { childList: true, subtree: true });
    }""")
    say(page, "a talk", 1)
    assert page.evaluate("window.keptAtTheEnd") is True


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("schema", "JSON Schema"),
        ("regex", "Regular expression"),
        ("choice", "One of these lines"),
        ("grammar", "Grammar (Lark or GBNF)"),
    ],
)
def test_an_example_of_each_kind_is_one_that_the_server_takes(
    page: Page, chat: str, kind: str, label: str
) -> None:
    page.goto(chat)
    page.get_by_label("Bound by").select_option(kind)
    page.get_by_role("button", name=f"Insert an example of {label}").click()
    expect(page.locator(".verdict")).to_contain_text("The server would serve this.")


def test_the_example_of_tools_is_one_that_the_server_takes(page: Page, chat: str) -> None:
    page.goto(chat)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Insert an example of tools").click()
    expect(page.locator(".verdict")).to_contain_text("The server would serve this.")


def test_the_page_follows_an_answer_unless_one_reads_what_is_above(page: Page, chat: str) -> None:
    page.goto(chat)
    for turn in range(1, 5):
        say(page, f"turn {turn}", turn)
    below = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    talk = page.locator(".talk")
    assert talk.evaluate(below) < 40
    talk.evaluate("e => { e.scrollTop = 0; }")
    say(page, "one more", 5)
    assert talk.evaluate("e => e.scrollTop") == 0


MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
TOKENIZER = byte_tokenizer()


def received(log: SequenceLog) -> list[tuple[str, str]]:
    """The messages of a request: roles and texts."""
    prompt = TOKENIZER.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)
    return [(found[1], found[2]) for found in MESSAGE.finditer(prompt)]


def reply(log: SequenceLog) -> str:
    """An answer that no other question has."""
    return f"# Heard\n\n1. *{received(log)[-1][1]}*\n2. **after {log.prompt_length}**\n"


def test_in_ten_turns_the_server_receives_what_the_page_shows(page: Page, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.set_viewport_size({"width": 1400, "height": 700})
    engine = NamedAdapter(answer=reply)
    engine.max_model_len = 8192
    users, answers = page.locator(".turn.user .text"), page.locator(".turn.assistant")
    sends = page.get_by_role("button", name="Send")

    def ask(text: str) -> None:
        page.get_by_label("Message", exact=True).fill(text)
        sends.click()

    def ended(turns: int) -> None:
        expect(answers).to_have_count(turns)
        expect(sends).to_be_visible()
        expect(answers.last.locator("strong")).to_have_text(f"after {engine.submitted[-1].prompt_length}")

    def below() -> int:
        pixels: int = page.locator(".talk").evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight")
        return pixels

    with planted_console(tmp_path / "data", engine) as url:
        page.goto(url)
        page.get_by_label("System prompt").fill("Be brief.")
        for turn in range(1, 5):
            ask(f"question {turn}\nof ten")
            ended(turn)
            assert below() < 40

        engine.hold_after = 12  # the fifth answer stops in the middle, and the page is loaded again
        ask("question 5")
        expect(answers.last).to_contain_text("Heard")
        page.reload()
        engine.hold_after = None
        expect(users.last).to_have_text("question 5")  # perhaps with the part of its answer that came
        page.get_by_role("button", name="Again").click()
        ended(5)
        ask("question 6")
        ended(6)
        page.get_by_role("button", name="Again").click()
        ended(6)
        ask("question 7, worse")
        ended(7)
        page.get_by_role("button", name="Edit").last.click()
        ask("question 7")
        ended(7)

        page.get_by_role("button", name="New", exact=True).click()
        ask("of something else")
        ended(1)
        assert received(engine.submitted[-1]) == [("system", "Be brief."), ("user", "of something else")]
        page.get_by_text("Conversations in this browser").click()
        page.get_by_role("button", name="question 1 of ten", exact=True).click()
        for turn in range(8, 11):
            ask(f"question {turn}")
            ended(turn)
        assert below() < 40

        sent = received(engine.submitted[-1])
        last = reply(engine.submitted[-1])
        assert [text for role, text in sent if role == "user"] == users.all_text_contents()
        assert users.all_text_contents() == [
            *(f"question {turn}\nof ten" for turn in range(1, 5)),
            *(f"question {turn}" for turn in range(5, 11)),
        ]
        said = [*(text for role, text in sent if role == "assistant"), last]
        drawn = [answer.locator("em, strong").all_text_contents() for answer in answers.all()]
        assert drawn == [re.findall(r"\*+([^*]+)\*+", text) for text in said]
        assert all(answer.locator(".heading").text_content() == "Heard" for answer in answers.all())
        answers.last.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == last
        with page.expect_download() as found:
            page.get_by_role("button", name="Export question 1 of ten").click()
        exported = json.loads(Path(found.value.path()).read_text(encoding="utf-8"))
        kept = [(one["role"], one["content"]) for one in exported["columns"][0]["messages"]]
        assert [("system", exported["system"]), *kept] == [*sent, ("assistant", last)]
