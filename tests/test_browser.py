"""Pages in a real browser, headless Chromium; `make browser` runs these tests, after `make docs`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainkit_report.comparison import compare
from trainkit_report.groups import runs_at
from trainkit_report.report import report
from written import EVIL, write_run

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
Opened = Callable[[Path | str], Any]

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    found = webdriver.Chrome(options=options, service=service)
    yield found
    found.quit()


@pytest.fixture
def opened(driver: Any) -> Iterator[Opened]:
    """``opened(page)``: the browser with a file or an address; at the end, no error was logged, nothing else asked."""
    allowed = ["file:", "data:", "blob:", "chrome:"]

    def open_page(page: Path | str) -> Any:
        driver.get_log("performance")
        if isinstance(page, str):
            allowed.append(page)
        driver.get(page if isinstance(page, str) else page.as_uri())
        return driver

    yield open_page
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
    assert [url for url in requested(driver) if not url.startswith(tuple(allowed))] == []


def requested(driver: Any) -> Iterator[str]:
    for line in driver.get_log("performance"):
        message = json.loads(line["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two groups of three seeds, with a comparison."""
    home = tmp_path_factory.mktemp("runs")
    for name, lr in (("low", 1e-3), ("high", 0.1)):
        for seed in (1, 2, 3):
            write_run(home / name / f"seed{seed}", seed=seed, lr=lr, gain=seed * lr)
    sides = [runs_at([home / name]) for name in ("low", "high")]
    path = home / "report.html"
    path.write_text(report([*sides[0], *sides[1]], comparison=compare(*sides)), encoding="utf-8")
    return path


def test_a_report_opens_within_a_second_and_requests_nothing_else(opened: Opened, page: Path) -> None:
    driver = opened(page)
    timing = driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert timing < 1000
    assert [url for url in requested(driver) if url.startswith(("http", "ws", "file"))] == [page.as_uri()]


def test_curves_are_drawn_with_bands_in_light_and_dark(opened: Opened, page: Path) -> None:
    driver = opened(page)
    seen = {}
    for scheme in ("light", "dark"):
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
        line, band = (driver.find_element("css selector", f"figure .{kind}.s1") for kind in ("line", "band"))
        assert driver.execute_script("return arguments[0].getTotalLength()", line) > 100
        assert band.rect["height"] > 1
        seen[scheme] = (
            line.value_of_css_property("stroke"),
            driver.find_element("tag name", "body").value_of_css_property("background-color"),
        )
    assert len(set(seen.values())) == 2
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_text_of_a_report_can_be_selected_and_its_markup_has_no_effect(opened: Opened, page: Path) -> None:
    driver = opened(page)
    driver.execute_script("window.getSelection().selectAllChildren(document.getElementById('samples'))")
    assert "<script>alert(1)</script>" in driver.execute_script("return window.getSelection().toString()")
    assert driver.find_elements("tag name", "script") == []
    assert driver.find_elements("tag name", "img") == []


def test_a_report_is_used_by_keyboard_and_named_for_screen_readers(opened: Opened, page: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    driver = opened(page)
    ActionChains(driver).send_keys(Keys.TAB).perform()
    assert driver.switch_to.active_element.text == "Skip to the content"
    for _ in range(2):
        ActionChains(driver).send_keys(Keys.TAB).perform()
    assert driver.switch_to.active_element.get_attribute("href").endswith("#curves")
    closed = driver.find_element("css selector", "details:not([open]) > summary")
    driver.execute_script("arguments[0].focus()", closed)
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    assert closed.find_element("xpath", "..").get_attribute("open") is not None
    charts = driver.find_elements("css selector", "figure svg")
    assert charts
    assert all(chart.get_attribute("role") == "img" and chart.get_attribute("aria-label") for chart in charts)
    named = "s => document.getElementById(s.getAttribute('aria-labelledby'))"
    unnamed = f"return [...document.querySelectorAll('section')].filter(s => !({named})(s)).length"
    assert driver.execute_script(unnamed) == 0
    assert driver.execute_script("return document.documentElement.lang") == "en"


CONTRASTS = """
const light = c => c.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
const luminance = c => { const [r, g, b] = light(c); return .2126 * r + .7152 * g + .0722 * b }
const numbers = text => text.match(/[\\d.]+/g).map(Number)
const paper = e => { const c = numbers(getComputedStyle(e).backgroundColor)
  return c.length === 3 || c[3] > 0 || !e.parentElement ? c.slice(0, 3) : paper(e.parentElement) }
document.querySelectorAll("details").forEach(each => each.open = true)
const texts = [...document.querySelectorAll("body *")].filter(e => e.tagName !== "title" &&
  [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
return texts.map(e => {
  const style = getComputedStyle(e), ink = numbers(e.tagName === "text" ? style.fill : style.color).slice(0, 3)
  const [low, high] = [luminance(ink), luminance(paper(e))].sort((a, b) => a - b)
  return (high + .05) / (low + .05) })
"""
"""The contrast of every text with what is behind it (WCAG 2.2, 1.4.3)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(opened: Opened, page: Path, scheme: str) -> None:
    driver = opened(page)
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    found = driver.execute_script(CONTRASTS)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(found) > 100
    assert min(found) >= 4.5


def test_a_printed_report_is_light_and_has_what_is_closed_on_the_screen(opened: Opened, page: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    driver = opened(page)
    closed = (
        "return [...document.querySelectorAll('details:not([open]) > :not(summary)')].map(e => e.checkVisibility())"
    )
    shown = driver.execute_script(closed)
    assert shown
    assert not any(shown)
    shown_now = closed.replace("checkVisibility()", "checkVisibility({contentVisibilityAuto: true})")

    def is_printed(driver: Any) -> bool:
        paper = driver.find_element("tag name", "body").value_of_css_property("background-color")
        return all(driver.execute_script(shown_now)) and paper == "rgba(255, 255, 255, 1)"

    feature = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": feature})
    try:  # the layout for the other medium takes a moment
        WebDriverWait(driver, 20).until(is_printed)
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@contextmanager
def width_of(driver: Any, width: int) -> Iterator[None]:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [390, 1200])
def test_a_report_is_no_wider_than_the_window(opened: Opened, page: Path, width: int) -> None:
    driver = opened(page)
    with width_of(driver, width):
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width


# ------------------------------------------------------------------------------------------------- the page of a run


@pytest.fixture
def served(tmp_path: Path, driver: Any) -> Iterator[tuple[Path, str]]:
    """A run that goes on, with its newest collection, and the address of the page about it."""
    from trainkit_report.watch import Server

    run = write_run(tmp_path / "run")
    tokens = {"text": ["4", " cats", "<eos>"], "logprob": [-0.1, -6.0, -0.2], "kl": [0.0, 0.4, -0.2]}
    rows = [
        {"step": 20, "kind": "rollout", "prompt": EVIL, "output": f"{at} cats", "reward": at, "tokens": tokens}
        for at in range(3)
    ]
    (run / "newest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Server([run]).start()
    yield run, server.url
    driver.get("about:blank")  # or it would ask on
    server.close()


def text_of(driver: Any, found: str) -> str:
    return str(driver.find_element("css selector", found).text)


def follow(driver: Any, by: str, found: str) -> None:
    """Clicks on a link or a button and waits for the page that it opens: a click returns before its page is there."""
    from selenium.webdriver.support.expected_conditions import staleness_of
    from selenium.webdriver.support.ui import WebDriverWait

    body = driver.find_element("tag name", "body")
    driver.find_element(by, found).click()
    WebDriverWait(driver, 20).until(staleness_of(body))


def test_the_page_of_a_run_follows_it_and_leaves_what_is_open(opened: Opened, served: tuple[Path, str]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    run, address = served
    driver = opened(address)
    closed = driver.find_element("css selector", "#curves details:first-of-type")
    driver.execute_script("arguments[0].open = !arguments[0].open", closed)
    before = bool(closed.get_attribute("open"))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 21, "reward/mean": 7.5}) + "\n")
    (run / "health.jsonl").write_text(
        json.dumps({"step": 21, "check": "signal", "message": "all rewards are equal"}) + "\n"
    )
    WebDriverWait(driver, 20).until(lambda _: "21 of 20" in text_of(driver, "#runs"))
    assert "all rewards are equal" in text_of(driver, "#health")
    assert "7.5" in text_of(driver, "#curves")
    assert bool(driver.find_element("css selector", "#curves details:first-of-type").get_attribute("open")) == before
    WebDriverWait(driver, 20).until(lambda _: text_of(driver, "#status").startswith("up to date at"))


def test_a_sentence_about_a_run_gives_way_to_the_next_one_and_to_its_page(
    opened: Opened, served: tuple[Path, str]
) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    run, address = served
    run.rename(run.with_name("later"))
    driver = opened(address)
    assert "there is no directory" in text_of(driver, "#why")
    run.mkdir()
    WebDriverWait(driver, 20).until(lambda _: "is no run and holds none" in text_of(driver, "#why"))
    run.rmdir()
    run.with_name("later").rename(run)
    WebDriverWait(driver, 20).until(lambda _: driver.find_elements("id", "curves"))


def test_a_rollout_is_found_and_its_tokens_are_coloured_by_what_is_chosen(
    opened: Opened, served: tuple[Path, str]
) -> None:
    run, address = served
    driver = opened(address)
    driver.find_element("css selector", "[name=text]").send_keys("2 CATS")
    follow(driver, "css selector", "form button")
    assert len(driver.find_elements("css selector", "#rollouts tbody tr")) == 1
    follow(driver, "css selector", "#rollouts tbody a")
    seen = {}
    for name in ("logprob", "kl"):
        driver.find_element("id", f"by-{name}").click()
        tokens = driver.find_elements("css selector", ".t")
        seen[name] = [token.value_of_css_property("background-color") for token in tokens]
    assert seen["logprob"][1] != seen["logprob"][0] != seen["kl"][0]
    assert seen["kl"][1] != seen["kl"][2]
    assert [token.text.strip() for token in tokens] == ["4", "cats", "<eos>"]
    (run / "newest.jsonl").write_text("")  # a newer collection takes its place
    time.sleep(5)
    assert len(driver.find_elements("css selector", ".t")) == 3
    follow(driver, "link text", "Close")
    assert driver.find_element("css selector", "[name=text]").get_attribute("value") == "2 CATS"


def test_the_page_of_a_run_works_without_javascript(opened: Opened, served: tuple[Path, str], driver: Any) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(served[1])
        assert "Without JavaScript" in text_of(driver, "#status")
        assert driver.find_elements("css selector", "noscript meta[http-equiv=refresh]")
        driver.find_element("css selector", "[name=least]").send_keys("1")
        follow(driver, "css selector", "form button")
        assert len(driver.find_elements("css selector", "#rollouts tbody tr")) > 1
        follow(driver, "link text", "tokens")
        assert len(driver.find_elements("css selector", ".t")) == 3
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_of_a_run_is_no_wider_than_the_window(opened: Opened, served: tuple[Path, str], width: int) -> None:
    driver = opened(served[1])
    follow(driver, "link text", "tokens")
    with width_of(driver, width):
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width


SITE_PAGES = ("index", "guides/fine-tune", "coming-from-trlx", "reference/settings", "reference/cli", "errors")


@pytest.mark.parametrize("name", SITE_PAGES)
def test_a_page_of_the_site_fits_a_narrow_window_and_follows_the_scheme_of_the_system(
    opened: Opened, name: str
) -> None:
    seen = []
    for scheme in ("light", "dark", "light"):  # also after another page was seen in the other scheme
        driver = opened(SITE / f"{name}.html")
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
        driver.refresh()
        seen.append(driver.find_element("tag name", "body").get_attribute("data-md-color-scheme"))
    assert seen == ["default", "slate", "default"]
    for width in (390, 1200):
        with width_of(driver, width):
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_setting_is_found_in_the_documentation_from_files(opened: Opened) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    assert (SITE / "index.html").exists(), "run `make docs` first"
    driver = opened(SITE / "index.html")
    field = driver.find_element("css selector", ".md-search__input")
    driver.execute_script("arguments[0].focus()", field)
    time.sleep(0.5)  # the index is read when the field has the focus
    field.send_keys("train.timeout")
    WebDriverWait(driver, 20).until(
        lambda _: "train.timeout" in driver.find_element("css selector", ".md-search-result__list").text
    )
