"""A browser to look at pages with."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest


@contextmanager
def chromium():
    """Chromium without a window; tests that need it are skipped where it is not installed."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("needs chromium and chromedriver on the path")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    quiet = "no-first-run disable-background-networking disable-component-update disable-sync"
    for option in f"headless no-sandbox disable-gpu hide-scrollbars {quiet}".split():
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    session = webdriver.Chrome(options=options, service=service)
    try:
        yield session
    finally:
        session.quit()
