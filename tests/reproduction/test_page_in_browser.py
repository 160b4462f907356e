"""The page as it is read: a summary on one screen, and a table of claims that can be filtered."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from reproduction import page
from tests.browsers import chromium
from tests.report_runs import Page
from tests.reproduction.trials import RESULTS


@pytest.fixture(scope="module")
def sections():
    return page.sections(RESULTS)


@pytest.fixture(scope="module")
def html(sections, tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "page.html"
    place.write_text(page._render("page.html.j2", sections, RESULTS), encoding="utf-8")
    return place


def test_every_claim_is_a_row_without_any_script(html, sections):
    found = Page(html)
    assert not found.open
    rows = [attributes for _, attributes, _ in found.all("tr") if "data-verdict" in attributes]
    claims = [(each.experiment.name, row) for each in sections for row in each.claims]
    assert [(row["data-experiment"], row["data-verdict"]) for row in rows] == [
        (name, row.kind) for name, row in claims
    ]
    assert {row["data-verdict"] for row in rows} <= set(page.KINDS)
    assert "hidden" not in {name for row in rows for name in row}
    (form,) = [attributes for _, attributes, _ in found.all("form")]
    assert "hidden" in form  # it does nothing without the script
    ids = [attributes["id"] for _, attributes, _ in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', found.source)) <= set(ids)
    assert not re.search(r'(?:src|href)="(?:https?:)?//', found.source)


def test_the_summary_counts_each_claim_of_the_paper_once(sections):
    short = page._in_short(sections)
    told = [each for line in short.lines for each in line.told]
    claims = [row for each in sections for row in each.claims if not row.claim.ours]
    assert len(told) == len(claims) == sum(short.counted.values())
    known = Counter(row.kind for row in claims if row.kind != "not measured")
    assert all(short.counted[kind] >= count for kind, count in known.items())
    assert short.alone == sum("one seed" in each.row.rests.split(", ") for each in told)
    groups = ["holds"], ["holds partly"], ["does not hold"], ["within noise", "not tested"]
    assert sum(len(short.of(*each)) for each in groups) == len(short.lines)
    for line in short.of("does not hold"):
        assert line.why


@pytest.fixture(scope="module")
def browser():
    with chromium() as session:
        yield session


def visit(browser, html, *, width=1280, height=900, script=True):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
    browser.get(html.resolve().as_uri())


SHOWN = (
    "return [...document.querySelectorAll('#all-claims tbody tr')].filter(e => !e.hidden).length"
)


def choose(browser, name, value):
    browser.execute_script(
        "const e = document.getElementById('filter').elements[arguments[0]];"
        "e.value = arguments[1]; e.dispatchEvent(new Event('input', {bubbles: true}));",
        name,
        value,
    )


def test_claims_can_be_filtered(browser, html, sections):
    visit(browser, html)
    rows = [(each.experiment.name, row) for each in sections for row in each.claims]
    assert browser.execute_script(SHOWN) == len(rows)
    choose(browser, "verdict", "does not hold")
    fails = [(name, row) for name, row in rows if row.kind == "does not hold"]
    assert browser.execute_script(SHOWN) == len(fails)
    choose(browser, "whose", "paper")
    assert browser.execute_script(SHOWN) == sum(not row.claim.ours for _, row in fails)
    choose(browser, "experiment", "correlation")
    choose(browser, "verdict", "")
    choose(browser, "whose", "")
    correlation = sum(name == "correlation" for name, _ in rows)
    assert browser.execute_script(SHOWN) == correlation
    said = browser.find_element("id", "filtered").text
    assert said == f"{correlation} of {len(rows)} rows"
    choose(browser, "words", "no such words anywhere")
    assert browser.execute_script(SHOWN) == 0
    assert not [row for row in browser.get_log("browser") if row["level"] == "SEVERE"]


def test_the_filter_is_reached_by_keys_and_takes_words(browser, html, sections):
    visit(browser, html)
    keys = pytest.importorskip("selenium.webdriver").Keys
    field = browser.find_element("name", "words")
    browser.execute_script("document.getElementsByName('verdict')[0].focus()")
    for _ in range(3):
        browser.switch_to.active_element.send_keys(keys.TAB)
    assert browser.switch_to.active_element == field
    field.send_keys("Separability OUTPUT")
    found = browser.execute_script(SHOWN)
    assert 0 < found < sum(len(each.claims) for each in sections)
    field.send_keys(keys.ENTER)  # sends nothing anywhere
    assert browser.execute_script(SHOWN) == found
    field.send_keys(keys.TAB)
    browser.switch_to.active_element.send_keys(keys.SPACE)
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert browser.execute_script(SHOWN) == sum(len(each.claims) for each in sections)


def test_a_section_asks_for_its_own_claims(browser, html, sections):
    visit(browser, html)
    link = browser.find_element("css selector", "#mechanism a[data-filter]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
    link.click()
    (section,) = [each for each in sections if each.experiment.name == "mechanism"]
    assert browser.execute_script(SHOWN) == len(section.claims)


def test_without_a_script_it_is_a_plain_table(browser, html):
    visit(browser, html, script=False)
    try:
        form = browser.find_element("id", "filter")
        assert not form.is_displayed()
        rows = browser.find_elements("css selector", "#all-claims tbody tr")
        assert rows[0].is_displayed()
        assert rows[-1].is_displayed()
    finally:
        visit(browser, html)


def test_the_summary_is_on_one_screen(browser, html):
    visit(browser, html)
    bottom = browser.execute_script(
        "return document.querySelector('.short').getBoundingClientRect().bottom + scrollY"
    )
    assert bottom <= 900


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(browser, html, width):
    visit(browser, html, width=width)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
