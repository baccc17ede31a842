"""One headless Chromium for all tests of this folder; what they open must need no network but this machine's own."""

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

WIDTH_PX, HEIGHT_PX = 1280, 900
# Quiet and without a network: no updates, no synchronisation, no name resolves but this machine's.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE 127.0.0.1",
    "--proxy-server=direct://",
    f"--window-size={WIDTH_PX},{HEIGHT_PX}",
)


@pytest.fixture(scope="session")
def _driver() -> Iterator[Any]:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine; type: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; pip install '.[test]'")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        # Naming the driver keeps selenium from looking for one on the network.
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        driver.set_page_load_timeout(120)
        yield driver
        driver.quit()


@pytest.fixture
def browser(_driver: Any) -> Any:
    """A selenium Any: an empty page of 1280 x 900 px, no cookies, an empty console; skips where there is none.

    `browser.get_log("browser")` returns what pages wrote to the console since it was last asked.
    """
    # A window has a frame and a least width; the emulated screen has neither.
    screen = {"width": WIDTH_PX, "height": HEIGHT_PX, "deviceScaleFactor": 1, "mobile": False}
    _driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    _driver.get("about:blank")
    _driver.delete_all_cookies()
    _driver.get_log("browser")
    return _driver
