"""The page before a gateway that asks for keys."""

from pathlib import Path

import pytest

from gateway.access.api_keys import hash_of
from tests.gateway.bench import make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir
from tests.gateway.http_bench import http_bench, http_gateway
from tests.page.browser import browser

pytestmark = pytest.mark.page

KEY = "omr_a-key-of-the-page"
STATE = "document.getElementById('stack').dataset.state"
FIELD = "document.getElementById('key-field').hidden"
TOLD = "document.getElementById('stack-text').textContent"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
ANSWER = "document.querySelector('.assistant:last-of-type')"


async def test_a_key_is_asked_for_and_kept_until_the_tab_is_closed(tmp_path: Path, microphone: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"page: {{sha256: {hash_of(KEY)}}}\n")
    keys.chmod(0o600)
    config = make_config(make_checkpoint_dir(tmp_path / "checkpoint"), http_gateway(api_keys=str(keys)))

    async with http_bench(config) as b, browser(tmp_path, microphone) as page:
        b.stages.serve(b.encode("Hello"))
        await page.resize(1200, 800)
        await page.open(b.url)
        await page.until(f"{STATE} === 'away' && !{FIELD}")
        assert await page.js(TOLD) == "needs an API key"
        await page.resize(390, 844, phone=True)
        assert await page.js(SIDEWAYS) == 0
        assert await page.js("document.getElementById('send').getBoundingClientRect().right") <= 390
        await page.click("#key")
        await page.write("omr_wrong")
        await page.press("Enter")
        await page.until(f"{TOLD} === 'the API key is not accepted'")
        await page.js("document.getElementById('key').select()")
        await page.write(KEY)
        await page.press("Enter")
        await page.until(f"{STATE} === 'ready'")
        await page.ask("Hi")
        await page.until(f"{ANSWER}?.dataset.state === 'done'")
        assert await page.js(f"{ANSWER}.querySelector('.words').textContent") == "Hello"
        # It ends with the tab: neither other tabs nor a later visit have it.
        kept = "JSON.stringify([{...localStorage}, document.cookie, location.href])"
        assert KEY not in await page.js(kept)
        await page.open(b.url)
        await page.until(f"{STATE} === 'ready'")
        await page.until(f"{ANSWER}?.querySelector('.words').textContent === 'Hello'")
        # What was refused before, and nothing else.
        assert all("401" in each for each in page.problems), page.problems
        assert not any(KEY in each for each in page.requests)
