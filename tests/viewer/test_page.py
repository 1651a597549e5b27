"""The pages in a real Chromium, with made answers: every page and state, keys, hostile texts, reports, live updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import Tab, playwright
from .made import FORGE, HOSTILE, Server, embedded, episode_line, live, report, step, training

expect = playwright.expect

PAGES = {
    "/": "Sources",
    "/runs/small": "small",
    "/runs/running": "This page follows",
    "/runs/interrupted": "Run the same command again to resume",
    "/runs/empty": "No episode has a result yet",
    "/runs/one": "1 episode",
    "/compare?a=big&b=small": "b is better",
    "/compare": "Choose two runs",
    "/runs/small/episodes/task-0011-0?at=11": "truncated",
    "/runs/small/episodes/task-0011-0?tab=checks": "expected 2026-11-26-report-004.txt",
    "/runs/small/episodes/task-0011-0?tab=files": "as the agent left it",
    "/runs/small/episodes/task-0006-0": "the endpoint answered 503",
    "/runs/small/episodes/desktop?tab=replay&picture=3": "4 of 7 screenshots",
    "/runs/small/episodes/long?step=2500": "#2500",
    "/training/grpo-a": "0 of 2",
    "/training/grpo-b?with=grpo-a": "Guard mismatch fired",
    "/training/grpo-new": "No step has been made yet",
    "/training/grpo-now": "This page follows",
    "/pools/pool-1": "Pool of grpo-a",
    "/pools/pool-1?list=groups": "zero variance",
    "/pools/pool-1/episodes/2?at=2": "Process rewards",
    "/pools/pool-1/episodes/2?tab=tokens&turn=3": "trained on 230 tokens",
    "/pools/pool-1/episodes/2?tab=tokens&turn=3&by=advantage": "far above 0",
    "/pools/pool-1/episodes/2?tab=sequences": "Turns 0 – 6",
    "/pools/pool-1/episodes/2?tab=about": "the verifier agrees with the judge",
    "/boards/board-1": "model-0",
    "/audits/audit-1": "breaks the task",
    "/attacks/attack-1": "No exploit earned reward",
    "/experiments/personal": "0.20 [0.11, 0.29]",
    "/experiments/begun": "No results yet",
    "/online/online-1": "Roll back to it",
    "/live": "process 4711",
    "/search?q=incoming": "20 hits",
    "/search?q=nothing": "Nothing was found",
    "/search": "All words must be in one step",
    "/what": "There is no such page",
}
"""Address of a page -> a text on it."""


@pytest.fixture(scope="module")
def axe(node_modules: Path) -> str:
    return (node_modules / "node_modules/axe-core/axe.min.js").read_text()


def until(page: Any, condition: str) -> None:
    """Wait until something holds in the page. Playwright's own way is forbidden by the page's policy."""
    look = f"const look = () => ({condition}) ? done() : requestAnimationFrame(look); look();"
    page.evaluate(f"() => new Promise((done) => {{ {look} }})")


def accessible(page: Any, axe: str) -> None:
    """Nothing of the page is a serious obstacle for people who use it with other means."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    bad = [
        f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert bad == []


@pytest.mark.parametrize("address", PAGES)
def test_every_page_is_shown_in_both_colours_and_on_a_phone(address: str, shared: Server, tab: Tab, axe: str) -> None:
    page = tab.open(shared.url + address)
    expect(page.locator("main")).to_contain_text(PAGES[address])
    accessible(page, axe)
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-mantine-color-scheme=dark]")
    until(page, "!document.getAnimations().some(one => one instanceof CSSTransition)")  # colours fade over
    accessible(page, axe)
    page.set_viewport_size({"width": 360, "height": 780})
    until(page, "innerWidth === 360")
    until(page, "document.documentElement.scrollWidth <= 360")  # not wider than the phone
    accessible(page, axe)
    assert page.title().endswith("ClawGym")


def test_a_page_that_is_not_there_says_what_to_do(server: Server, browser: Any) -> None:
    tab = Tab(browser)
    page = tab.open(server.url + "/runs/none")
    expect(page.get_by_role("alert")).to_contain_text("The list of sources shows what there is")
    page.get_by_role("link", name="All sources").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sources")
    tab.context.close()
    assert len(tab.complaints) == 1, "more than the status 404 of the address"


def test_an_error_is_shown_and_tried_again(server: Server, browser: Any) -> None:
    tab = Tab(browser)
    server.failing.add("runs/small")
    page = tab.open(server.url + "/runs/small")
    expect(page.get_by_role("alert")).to_contain_text("receipt.json is cut off")
    server.failing.clear()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("small")
    # What was shown stays where a newer answer fails.
    server.failing.add("runs/small")
    server.tell({"kind": "source", "id": "small", "state": "complete", "changed": 1, "indexed": None})
    expect(page.locator("main")).to_contain_text("This is not the newest state")
    expect(page.get_by_role("heading", level=1)).to_contain_text("small")
    tab.context.close()


def test_loading_is_shown_and_empty_sources_say_what_to_run(server: Server, tab: Tab) -> None:
    server.silent.add("sources")
    server.made.answers["sources"] |= {"sources": [], "problems": []}
    tab.page.goto(server.url)
    expect(tab.page.get_by_role("status", name="Loading")).to_be_visible()
    server.released.set()
    expect(tab.page.locator("main")).to_contain_text("clawgym eval terminal-basic --agent oracle")


def test_colours_are_switched_and_kept(server: Server, tab: Tab) -> None:
    page = tab.open(server.url)
    page.get_by_role("button", name="Colours: as the system").click()
    page.wait_for_selector("html[data-mantine-color-scheme=dark]")
    page.reload()
    page.wait_for_selector("html[data-mantine-color-scheme=dark]")
    page.keyboard.press("t")
    page.wait_for_selector("html[data-mantine-color-scheme=light]")


# ------------------------------------------------------------------------------------------------- keys and addresses


def test_keys_choose_open_and_leave(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/big?sort=order")
    page.wait_for_selector(".vt-body .open")
    for _ in range(30):
        page.keyboard.press("j")
    until(page, "document.activeElement.closest('[data-index]')?.dataset.index === '29'")
    page.keyboard.press("k")
    until(page, "document.activeElement.closest('[data-index]')?.dataset.index === '28'")
    wanted = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(wanted)
    expect(page.locator("main")).to_contain_text("29 of 5,000")  # it knows its neighbours
    page.keyboard.press("n")
    expect(page.get_by_role("heading", level=1)).not_to_contain_text(wanted)
    expect(page.locator("main")).to_contain_text("30 of 5,000")
    page.keyboard.press("p")
    expect(page.get_by_role("heading", level=1)).to_contain_text(wanted)
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_contain_text("big")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Next or previous row")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("0042")
    expect(page.get_by_role("status").filter(has_text="episode")).to_have_text("1 of 5,000 episodes")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    page.goto(server.url + "/live")
    page.wait_for_selector("main h1")
    page.keyboard.press("/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Search")


def test_filters_and_sort_are_in_the_address_and_in_the_export(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/big")
    page.get_by_label("Outcome", exact=True).select_option("failed")
    page.get_by_label("Category", exact=True).select_option("data")
    page.get_by_role("button", name="steps", exact=True).click()
    expect(page.get_by_role("columnheader", name="steps")).to_have_attribute("aria-sort", "descending")
    page.wait_for_url(re.compile(r"outcome=failed&category=data&sort=-steps"))
    link = page.get_by_role("link", name="Export what is shown as CSV").get_attribute("href")
    assert link == "/api/runs/big/episodes?sort=-steps&outcome=failed&category=data&format=csv"
    status = page.get_by_role("status").filter(has_text="episodes")
    expect(status).to_have_text("286 of 5,000 episodes")
    page.reload()
    expect(status).to_have_text("286 of 5,000 episodes")
    first = page.locator(".vt-body .open").first
    expect(first).to_be_visible()
    first.click()
    page.wait_for_url(re.compile(r"/episodes/.*outcome=failed"))
    page.get_by_role("link", name="big", exact=True).click()
    expect(status).to_have_text("286 of 5,000 episodes")
    page.get_by_role("button", name="Clear filters").click()
    expect(status).to_have_text("5,000 episodes")


def test_a_check_leads_to_the_episodes_that_fail_it(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/big")
    page.get_by_role("button", name="content_matches").click()
    page.wait_for_url(re.compile("check=content_matches"))
    expect(page.get_by_role("status").filter(has_text="of 5,000 episodes")).to_be_visible()


def test_two_runs_are_chosen_and_compared(server: Server, tab: Tab) -> None:
    page = tab.open(server.url)
    page.get_by_role("checkbox", name="Compare big").check()
    page.get_by_role("checkbox", name="Compare small").check()
    page.get_by_role("button", name="Compare the two runs").click()
    page.wait_for_url(re.compile(r"/compare\?a=big&b=small"))
    expect(page.locator("main")).to_contain_text("no significant difference")


def test_going_back_returns_to_the_same_place(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/big")
    page.wait_for_selector(".vt-body .open")
    page.evaluate("scrollTo(0, 60000)")
    until(page, "document.querySelector('.vt-body [data-index]:has(.open)')?.dataset.index > 800")
    place = page.evaluate("scrollY")
    page.locator(".vt-body .open").nth(18).click()  # those before it are above the screen
    expect(page.get_by_role("tab", name="Timeline")).to_be_visible()
    page.go_back()
    until(page, f"Math.abs(scrollY - {place}) < 3")


# ------------------------------------------------------------------------------------------------- parts of pages


def test_a_long_timeline_goes_to_a_step_and_keeps_what_was_opened(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/small/episodes/long?step=2500")
    card = page.get_by_label("Step 2500, Agent")
    expect(card).to_be_in_viewport()
    page.keyboard.press("j")
    expect(page.get_by_label("Step 2501, Agent")).to_be_in_viewport()
    page.wait_for_url(re.compile("step=2501"))
    more = page.get_by_label("Step 2501, Agent").get_by_role("button", name=re.compile("Show all")).first
    more.click()
    expect(page.get_by_label("Step 2501, Agent").get_by_role("button", name="Show less")).to_be_visible()
    page.get_by_label("Go to step").fill("40")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Step 40, Agent")).to_be_in_viewport()
    expect(page.get_by_label("Step 2501, Agent")).to_have_count(0)
    page.get_by_label("Go to step").fill("2501")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Step 2501, Agent").get_by_role("button", name="Show less")).to_be_visible()


def test_tokens_are_walked_through_with_the_keys(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/pools/pool-1/episodes/2?tab=tokens")
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("[aria-live=polite]")).to_contain_text("position 90")
    expect(page.locator("[aria-live=polite]")).to_contain_text("sampled")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    page.wait_for_url(re.compile("turn=1"))


def test_a_sequence_is_marked_in_the_tree(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/pools/pool-1/episodes/2?tab=sequences")
    expect(page.locator(".tree .on")).to_have_text([re.compile("Turns 0 – 6"), re.compile("Turns 7 – 9")])
    page.get_by_role("radio", name="Show sequence 1 in the tree").check()
    expect(page.locator(".tree .on")).to_have_text([re.compile("Turns 0 – 6"), re.compile("Turns 10 – 15")])


def test_a_curve_is_hidden_read_and_shown_as_a_table(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/training/grpo-a")
    chart = page.get_by_role("figure").filter(has_text="Groups")
    line = chart.get_by_role("button", name="all zero")
    before = line.text_content()
    chart.get_by_role("img").hover(position={"x": 120, "y": 60})
    expect(line).not_to_have_text(before or "")
    line.click()
    expect(line).to_have_attribute("aria-pressed", "false")
    chart.get_by_role("button", name="Show as a table").click()
    expect(chart.get_by_role("table")).to_contain_text("all one")
    page.get_by_label("Lay another run over this one").select_option("grpo-b")
    page.wait_for_url(re.compile("with=grpo-b"))
    expect(page.get_by_role("button", name=re.compile("reward, grpo-b"))).to_be_visible()
    expect(page.get_by_role("region", name="Configuration")).to_contain_text("differs")


def test_a_version_is_promoted_after_a_question(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/online/online-1")
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("dialog")).to_contain_text("will answer all new sessions")
    page.get_by_role("button", name="Cancel").click()
    assert server.posted == []
    page.get_by_role("button", name="Roll back to it").click()
    page.get_by_role("button", name="Roll back", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert server.posted == [("/api/online/online-1/rollback", {"version": 1})]


def test_pictures_are_replayed(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/small/episodes/desktop?tab=replay")
    picture = page.get_by_role("img", name="Screenshot 1 of 7")
    expect(picture).to_be_visible()
    page.keyboard.press("]")
    expect(page.get_by_role("img", name="Screenshot 2 of 7")).to_be_visible()
    expect(page.locator(".aside")).to_contain_text("left_click")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("img", name="Screenshot 7 of 7")).to_be_visible(timeout=20_000)
    page.get_by_role("button", name="Open in the timeline").click()
    expect(page.get_by_label("Step 13, Agent")).to_be_in_viewport()


# ------------------------------------------------------------------------------------------------- live


def test_a_page_follows_a_run_and_keeps_its_place(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/runs/running")
    rows = page.get_by_role("status").filter(has_text="episode")
    expect(rows).to_have_text("9 episodes")
    until(page, "document.querySelectorAll('.vt-body .open').length === 9")
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.textContent")
    place = page.evaluate("scrollY")
    server.made.run("running", [episode_line(n) for n in range(3, 33)], state="running", planned=40)
    server.tell({"kind": "source", "id": "running", "state": "running", "changed": 2, "indexed": None})
    expect(rows).to_have_text("30 episodes")
    assert page.evaluate("document.activeElement.textContent") == focused
    assert abs(page.evaluate("scrollY") - place) < 3


def test_live_sandboxes_and_curves_follow(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/live")
    expect(page.get_by_role("article")).to_have_count(3)
    server.made.answers["live"] = live(0)
    server.tell({"kind": "live"})
    expect(page.locator("main")).to_contain_text("Nothing runs now")
    page.goto(server.url + "/training/grpo-now")
    page.wait_for_selector("main h1")
    expect(page.locator("main")).to_contain_text("40 steps so far")
    server.made.answers["training/grpo-now"] = training("grpo-now", seed=3, state="running", steps=60)
    server.tell({"kind": "source", "id": "grpo-now", "state": "running", "changed": 2, "indexed": None})
    expect(page.locator("main")).to_contain_text("60 steps so far")


def test_a_lost_connection_is_shown_and_taken_up_again(server: Server, tab: Tab) -> None:
    page = tab.open(server.url + "/live")
    expect(page.get_by_role("article")).to_have_count(3)
    server.made.answers["live"] = live(1)
    server.cut()
    expect(page.get_by_role("article")).to_have_count(1)
    expect(page.get_by_text("Connection lost")).to_have_count(0)


# ------------------------------------------------------------------------------------------------- hostile texts


HOSTILE_PAGES = (
    "/runs/small",
    "/runs/small/episodes/hostile",
    "/runs/small/episodes/hostile?tab=checks",
    "/runs/small/episodes/hostile?tab=files",
    "/search?q=incoming",
)


@pytest.mark.parametrize("address", HOSTILE_PAGES)
def test_hostile_texts_are_shown_and_do_nothing(address: str, shared: Server, tab: Tab) -> None:
    page = tab.open(shared.url + address)
    expect(page.locator("main")).to_contain_text(f"<script>{FORGE}</script>")
    text = page.evaluate("document.body.innerText")
    assert "\\x1b[2J\\u202egnp.exe \\x00" in text
    every = page.evaluate("document.documentElement.outerHTML") + page.title()
    assert not set(every) & set("\x1b\u202e\x00")
    assert page.title() != "forged"
    assert page.locator("main script, main iframe, main [onerror], [src^='javascript:']").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# ------------------------------------------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def opened(shared: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    data = embedded(shared.made, "small")
    name = "runs/small/episodes/desktop"
    data["answers"][f"{name}/turns"]["items"] = [step(n, pictures=True) for n in range(14)]
    path.write_text(report(data))
    return path.as_uri()


def test_a_report_opens_from_a_file(opened: str, tab: Tab, axe: str) -> None:
    page = tab.open(opened)
    expect(page.get_by_role("heading", level=1)).to_contain_text("small")
    accessible(page, axe)
    assert page.get_by_role("link", name="Live").count() == 0, "a report has no live page"
    status = page.get_by_role("status").filter(has_text="episode")
    page.get_by_label("Outcome", exact=True).select_option("failed")
    expect(status).to_have_text("12 of 40 episodes")
    page.get_by_label("Filter episodes by text").fill("0008")
    expect(status).to_have_text("1 of 40 episodes")
    page.locator(".vt-body .open").click()
    expect(page.get_by_label("Step 1, Agent")).to_be_visible()
    page.go_back()
    expect(status).to_have_text("1 of 40 episodes")
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_role("button", name="time", exact=True).click()
    expect(page.get_by_role("columnheader", name="time")).to_have_attribute("aria-sort", "descending")
    first, second = (page.locator(".vt-body [role=row]").nth(n).get_by_role("cell").nth(8) for n in (0, 1))
    expect(first).to_have_text("3 min 30 s")
    expect(second).to_have_text("3 min 23 s")
    page.goto(opened + "#/runs/small/episodes/hostile?tab=checks")
    expect(page.locator("main")).to_contain_text(HOSTILE[:20])
    page.goto(opened + "#/runs/other")
    expect(page.get_by_role("alert")).to_contain_text("This report does not contain that")
