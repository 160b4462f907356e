"""The page of a server, in a browser: a form for a table, and drawing for images."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from PIL import Image

from covary import data
from tests.browsers import chromium
from tests.commands import trained_run
from tests.servers import HOSTILE, live, row, trained

# The form's own row: categories and truth values as texts, and no constant.
SHOWN = "return document.querySelector('#outputs {}').textContent"


@pytest.fixture(scope="module")
def browser():
    with chromium() as session:
        yield session


@pytest.fixture(scope="module")
def prices(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("prices"), "<i>price")


@pytest.fixture(scope="module")
def table(prices):
    with live(prices) as found:
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    run = trained_run(tmp_path_factory.mktemp("digits"), "digits", epochs=8, hidden=(32,))
    with live(run.path) as found:
        yield found


def wait_for(browser, what):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 20, 0.05).until(lambda _: what())


def visit(browser, server, *, width=1200, scheme="light"):
    browser.get_log("browser")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(server.url)
    wait_for(browser, lambda: browser.find_elements("css selector", "#outputs > *"))


def text(browser, place: str) -> str:
    return browser.execute_script(SHOWN.format(place))


def field(browser, name: str):
    """The control with this label, as somebody finds it who hears the page."""
    found = browser.execute_script(
        """const label = [...document.querySelectorAll("label")]
             .find(l => l.textContent === arguments[0]);
           return label && label.control;""",
        name,
    )
    assert found, f"no control is labelled {name!r}"
    return found


def slide(browser, name: str, share: float) -> None:
    browser.execute_script(
        """const s = [...document.querySelectorAll("input[type=range]")]
             .find(s => s.getAttribute("aria-label") === `${arguments[0]}, slider`);
           s.value = Number(s.min) + arguments[1] * (s.max - s.min);
           s.dispatchEvent(new Event("input", {bubbles: true}));""",
        name,
        share,
    )


def parts(browser) -> set[str]:
    names = "return [...document.querySelectorAll('[data-part]')].map(e => e.dataset.part)"
    return set(browser.execute_script(names))


def digits_of(told: str) -> float:
    return float(told.replace(",", "").replace("\u2212", "-").replace("\u00b1", ""))


def test_the_form_is_made_of_the_schema(table, browser):
    visit(browser, table)
    assert browser.find_element("id", "title").text == "Predict <i>price"
    for name in ("income", "\u00b1 (income_error)", "rooms", "sold", "<b>city</b>", "garden"):
        field(browser, name)
    options = browser.execute_script(
        "return [...arguments[0].options].map(o => o.textContent)", field(browser, "<b>city</b>")
    )
    assert options == [HOSTILE, "Bonn", "Oslo", "(missing)"]
    assert (
        browser.execute_script("return document.querySelectorAll('main img, main i b').length") == 0
    )
    assert field(browser, "sold").get_attribute("type") == "date"
    assert browser.get_log("browser") == []


def test_typing_gives_what_the_server_says(table, browser):
    visit(browser, table)
    for name, value in {"income": "55.5", "rooms": "7", "\u00b1 (income_error)": "3"}.items():
        control = field(browser, name)
        control.clear()
        control.send_keys(value)
    sold = browser.execute_script("return arguments[0].value", field(browser, "sold"))
    garden = browser.execute_script("return arguments[0].value", field(browser, "garden"))
    wanted = row(
        **{"income": 55.5, "rooms": 7, "income_error": 3.0, "sold": sold, "<b>city</b>": HOSTILE},
        garden=garden,
    )
    (said,) = table.client.post("/predict", json=[wanted]).json()["predictions"]
    shown = lambda: digits_of(text(browser, ".prediction"))  # noqa: E731
    wait_for(browser, lambda: abs(shown() - said["prediction"]) < 0.01 * abs(said["prediction"]))
    wait_for(browser, lambda: "input errors" in parts(browser))
    wait_for(browser, lambda: abs(digits_of(text(browser, ".std")) / said["std"] - 1) < 0.06)
    assert "90% of such targets lie from" in text(browser, ".interval")
    assert browser.get_log("browser") == []


def test_numbers_change_as_a_slider_moves_and_far_off_someone_is_to_be_asked(table, browser):
    visit(browser, table)
    seen = set()
    for share in (0.2, 0.5, 0.8):
        before = text(browser, ".prediction")
        slide(browser, "income", share)
        wait_for(browser, lambda before=before: text(browser, ".prediction") != before)
        seen.add(text(browser, ".prediction"))
    assert len(seen) == 3
    control = field(browser, "income")
    control.clear()
    control.send_keys("9999")
    wait_for(browser, lambda: "income: off the data" in text(browser, "#verdict"))
    assert "Ask someone" in text(browser, "#verdict")
    wait_for(browser, lambda: "distance" in parts(browser))
    control.clear()
    wait_for(browser, lambda: "income: missing" in text(browser, "#verdict"))
    assert browser.get_log("browser") == []


def test_a_server_that_is_gone_is_told_and_found_again(prices, browser):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alert = lambda: browser.find_element("id", "trouble")  # noqa: E731
    with live(prices, port=port) as server:
        visit(browser, server)
        assert not alert().is_displayed()
    slide(browser, "income", 0.7)
    wait_for(browser, lambda: alert().is_displayed())
    assert "The server does not answer" in alert().text
    assert alert().get_attribute("role") == "alert"
    with live(prices, port=port):
        wait_for(browser, lambda: not alert().is_displayed())
    browser.get_log("browser")


def test_a_token_is_asked_for(prices, browser):
    with live(prices, token="a-token-of-many-letters") as server:
        browser.get(server.url)
        box = browser.find_element("id", "token")
        wait_for(browser, box.is_displayed)
        for given, place in (("wrong", "trouble"), ("a-token-of-many-letters", "outputs")):
            box.send_keys(given + "\n")
            wait_for(browser, browser.find_element("id", place).is_displayed)
        assert not box.is_displayed()
        browser.execute_script("sessionStorage.clear()")
    browser.get_log("browser")


def draw(browser, *points: tuple[float, float]) -> None:
    from selenium.webdriver import ActionChains

    canvas = browser.find_element("id", "canvas")
    width = canvas.size["width"]
    actions = ActionChains(browser, duration=20)
    places = [(round((x - 0.5) * width), round((y - 0.5) * width)) for x, y in points]
    actions.move_to_element_with_offset(canvas, *places[0]).click_and_hold()
    for place in places[1:]:
        actions.move_to_element_with_offset(canvas, *place)
    actions.release().perform()


def test_drawing_gives_probabilities(pictures, browser):
    visit(browser, pictures)
    assert "Draw, or choose a picture" in text(browser, "")
    draw(browser, (0.5, 0.15), (0.5, 0.85))
    wait_for(browser, lambda: browser.find_elements("css selector", "#outputs .classes"))
    one = text(browser, ".classes")
    draw(browser, (0.3, 0.3), (0.7, 0.3), (0.7, 0.7), (0.3, 0.7), (0.3, 0.3))
    wait_for(browser, lambda: text(browser, ".classes") != one)
    assert len(browser.find_elements("css selector", "#outputs .classes dt")) == 10
    browser.find_element("id", "clear").click()
    wait_for(browser, lambda: "Draw, or choose a picture" in text(browser, ""))
    assert browser.get_log("browser") == []


def test_a_picture_is_given_as_it_is(pictures, browser, tmp_path):
    image = data.load("digits").x_test[0].numpy()
    Image.fromarray(image[0]).save(tmp_path / "digit.png")
    (said,) = pictures.client.post("/predict", json=image.tolist()).json()["predictions"]
    visit(browser, pictures)
    browser.find_element("id", "file").send_keys(str(tmp_path / "digit.png"))
    wait_for(browser, lambda: browser.find_elements("css selector", "#outputs .prediction"))
    assert text(browser, ".prediction") == said["prediction"]
    given = browser.execute_script(
        """const c = document.getElementById("given");
           return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data]
             .filter((_, i) => i % 4 === 0);"""
    )
    assert given == image.ravel().tolist()
    (tmp_path / "none.png").write_text("no picture")
    browser.find_element("id", "file").send_keys(str(tmp_path / "none.png"))
    wait_for(browser, lambda: "no picture" in browser.find_element("id", "trouble").text)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", ["table", "pictures"])
def test_a_phone_does_not_scroll_sideways(name, request, browser):
    visit(browser, request.getfixturevalue(name), width=360)
    time.sleep(0.1)
    widths = "return [document.documentElement.scrollWidth, window.innerWidth]"
    assert browser.execute_script(widths) == [360, 360]


def test_dark_and_light(table, browser):
    colour = "return getComputedStyle(document.body).backgroundColor"
    visit(browser, table)
    light = browser.execute_script(colour)
    visit(browser, table, scheme="dark")
    assert browser.execute_script(colour) != light == "rgb(255, 255, 255)"
    browser.find_element("id", "theme").click()
    assert browser.execute_script(colour) == light
    browser.execute_script("localStorage.clear()")
