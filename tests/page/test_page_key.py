"""The page before a gateway that asks for keys."""

from pathlib import Path

import pytest

from gateway.access.api_keys import hash_of
from tests.gateway.bench import make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir
from tests.gateway.http_bench import http_bench, http_gateway
from tests.page.browser import browser
from tests.page.test_page import run

pytestmark = pytest.mark.page

KEY = "omr_a-key-of-the-page"
STATE = "document.getElementById('stack').dataset.state"
FIELD = "document.getElementById('key-field').hidden"
ANSWER = "document.querySelector('.assistant:last-of-type')"


def test_the_page_asks_for_a_key_and_keeps_it_to_itself(tmp_path: Path, microphone: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"page: {{sha256: {hash_of(KEY)}}}\n")
    keys.chmod(0o600)
    config = make_config(make_checkpoint_dir(tmp_path / "checkpoint"), http_gateway(api_keys=str(keys)))

    async def scenario() -> None:
        async with http_bench(config) as b, browser(tmp_path, microphone) as page:
            b.stages.serve(b.encode("Hello"))
            await page.resize(1200, 800)
            await page.open(b.url)
            await page.until(f"{STATE} === 'away' && !{FIELD}")
            await page.click("#key")
            await page.write(KEY)
            await page.press("Enter")
            await page.until(f"{STATE} === 'ready'")
            await page.click("#text")
            await page.write("Hi")
            await page.press("Enter")
            await page.until(f"{ANSWER}?.dataset.state === 'done'")
            assert await page.js(f"{ANSWER}.querySelector('.words').textContent") == "Hello"
            kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
            assert KEY not in await page.js(kept)
            # What was refused before, and nothing else.
            assert all("401" in each for each in page.problems), page.problems
            assert not any(KEY in each for each in page.requests)

    run(scenario())
