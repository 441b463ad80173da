"""The status page shows the run and its reloads, live, in a real browser, and believes nothing it shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import aiockpt
from aiockpt import Reloader, _waking
from aiockpt.integrations.asgi import _board, _stream
from tests.browser import browsing
from tests.proof import save
from tests.serving import Net, commit, shard, waited, weights
from tests.web import ORDER, app_of, reloader_of, serving, talking


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only polls."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)


async def facts_of(client: httpx.AsyncClient) -> Any:
    """What the page would show."""
    return (await client.get("/aiockpt/status")).json()


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look lists the run anew."""
    monkeypatch.setattr(_board, "AGE", 0.0)
    monkeypatch.setattr(_board, "SHARE", 0)


# ---------------------------------------------------------------- the facts


@pytest.mark.usefixtures("prompt")
async def test_what_is_known_of_each_checkpoint(tmp_path: Path) -> None:
    """Served, verified, never tried, quarantined and why, damaged; its size, age, metrics, aliases."""
    run = tmp_path / "run"
    begun = time.time()
    for step in (1, 2):
        await save(run, {"model": weights(step)}, step, metrics={"loss": 1 / step, "odd": math.inf})
    reloader = reloader_of(run)
    async with talking(app_of(reloader)) as client:
        await reloader.wait_for(2)
        await save(run, {"model": weights(3)}, 3)
        await reloader.wait_for(3)
        bad = weights(4)
        bad["two.weight"][0, 0] = math.nan
        await save(run, {"model": bad}, 4)
        await waited(lambda: reloader.status()["failures"])
        cut = shard(commit(tmp_path / "made", 5))
        cut.write_bytes(cut.read_bytes()[:-1])
        cut.parent.rename(run / cut.parent.name)
        await reloader.catalog.promote(2)
        facts = await facts_of(client)
        rows = {row["step"]: row for row in facts["checkpoints"]}
        assert list(rows) == [5, 4, 3, 2, 1]
        verdicts = {step: row["verdict"] for step, row in rows.items()}
        assert verdicts == {5: "damaged", 4: "quarantined", 3: "verified", 2: "verified", 1: "committed"}
        assert "finite: step 4: NaN" in rows[4]["reason"]
        assert rows[5]["reason"]
        assert (rows[2]["aliases"], rows[3]["aliases"]) == (["production"], [])
        assert rows[2]["metrics"] == {"loss": 0.5, "odd": "inf"}
        assert begun - 1 <= rows[2]["time"] <= time.time() + 1
        assert rows[2]["nbytes"] == (await reloader.catalog.get(2)).nbytes
        assert facts["serving"]["step"] == 3
        assert [h["outcome"] for h in facts["history"]] == ["swapped", "swapped", "failed"]
        assert {r["step"] for r in facts["replicas"]} == {3}


@pytest.mark.usefixtures("prompt")
async def test_which_replica_serves_what(tmp_path: Path) -> None:
    """By their leases: whoever looks at one of them sees all."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    one, other = reloader_of(run), reloader_of(run)
    async with talking(app_of(one)) as client, other:
        await other.pin(1)
        await one.wait_for(2)
        await waited(lambda: other.status()["serving"]["step"] == 1)
        facts = await facts_of(client)
        steps = sorted(replica["step"] for replica in facts["replicas"])
        assert steps == [1, 2]
        assert all(replica["pid"] and replica["host"] for replica in facts["replicas"])


async def test_a_store_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page stays, with what it knew before; and many onlookers cost one listing."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    looks: list[int] = []
    board = _board.Board(reloader)
    async with reloader:
        await reloader.ready()
        before = await board.facts()

        async def failing() -> Any:
            looks.append(1)
            await asyncio.sleep(0.05)
            raise aiockpt.StorageError("the disk is gone")

        monkeypatch.setattr(reloader, "replicas", failing)
        await asyncio.gather(*(board.facts() for _ in range(5)))
        assert looks == []  # what is known is young enough
        board._until = 0.0
        found = await asyncio.gather(*(board.facts() for _ in range(5)))
        assert looks == [1]
        assert all("the disk is gone" in facts["trouble"] for facts in found)
        assert [f["checkpoints"] for f in found] == [before["checkpoints"]] * 5
    assert (await board.facts())["state"] == "closed"


# ---------------------------------------------------------------- the stream


async def read_events(answer: httpx.Response) -> AsyncIterator[Any]:
    """The facts that come as server-sent events."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["facts"]


async def test_events_tell_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap is told though the next look would be far away; a stream is over after its time."""
    monkeypatch.setattr(_stream, "PAUSE", 20.0)
    monkeypatch.setattr(_stream, "LIFE", 0.5)
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with talking(app_of(reloader)) as client:
        await reloader.ready()
        async with client.stream("GET", "/aiockpt/events") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert "x-aiockpt-step" not in answer.headers
            events = read_events(answer)
            assert (await anext(events))["serving"]["step"] == 1
            commit(run, 2)
            while (await anext(events))["serving"]["step"] != 2:
                pass
            await asyncio.sleep(0.5)
            commit(run, 3)  # wakes it, and it sees that its time is over
            assert [e async for e in events] == []


async def test_streams_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is sent away; one that left makes room."""
    monkeypatch.setattr(_stream, "MOST", 2)
    reloader = reloader_of(tmp_path / "run")
    async with talking(app_of(reloader)) as client:
        async with client.stream("GET", "/aiockpt/events") as one:
            ones = read_events(one)  # kept: what is dropped closes its answer
            await anext(ones)
            async with client.stream("GET", "/aiockpt/events") as two:
                twos = read_events(two)
                await anext(twos)
                assert (await client.get("/aiockpt/events")).status_code == 503

        async def again() -> int:
            async with client.stream("GET", "/aiockpt/events") as answer:
                return answer.status_code

        async with asyncio.timeout(10):
            while await again() != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_streams_end_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for them, and is not kept waiting: at the latest after a stream's life."""
    monkeypatch.setattr(_stream, "LIFE", 1.0)
    reloader = reloader_of(tmp_path / "run")
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as client:
        async with serving(app_of(reloader)) as url:
            answer = await client.send(client.build_request("GET", url + "/aiockpt/events"), stream=True)
            events = read_events(answer)
            await anext(events)
        assert [e async for e in events] == []
        await answer.aclose()


# ---------------------------------------------------------------- the page


async def test_the_page_comes_from_here_alone(tmp_path: Path) -> None:
    """No other host is named; the policy lets the page's own script and style run, and nothing else."""
    async with talking(app_of(reloader_of(tmp_path / "run"))) as client:
        for path in ("/aiockpt", "/aiockpt/"):
            page = await client.get(path)
            assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        for tag in ("script", "style"):
            (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        hosts = set(re.findall(r"https?://[^\"' ]+", page.text))
        assert hosts == {"http://www.w3.org/2000/svg"}  # a name, not an address
        assert re.search(r"<[^>]+\s(on\w+|style)=", page.text) is None
        assert "innerHTML" not in page.text
        assert (await client.get("/aiockpt/nothing")).status_code == 404
        assert (await client.head("/aiockpt")).content == b""
    async with talking(app_of(reloader_of(tmp_path / "run"), page=False)) as client:
        for path in ("", "/events", "/status"):
            assert (await client.get("/aiockpt" + path)).status_code == 404


@asynccontextmanager
async def watched(tmp_path: Path, reloader: Reloader[Net], **options: Any) -> AsyncIterator[tuple[Any, str]]:
    """The page in a browser, and the server's address; no error on the console in the end."""
    async with serving(app_of(reloader)) as url, browsing(tmp_path / "browser") as page:
        await page.open(url + "/aiockpt", **options)
        yield page, url
        assert page.trouble == []
        assert {"/".join(address.split("/")[:3]) for address in page.requests} == {url}


STEP = "document.getElementById('step').textContent"
ROWS = "[...document.querySelectorAll('#checkpoints tbody tr')].map(row => row.dataset.step)"


@pytest.mark.slow
async def test_in_a_browser(tmp_path: Path) -> None:
    """It renders; a new commit, a failure and a rollback appear without a reload; it ends with its server."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with watched(tmp_path, reloader) as (page, url):
        await page.until(f"{STEP} === '1' && {ROWS}.join() === '1'")
        await page.look("window.same = true")
        await save(run, {"model": weights(2)}, 2, metrics={"loss": 0.25})
        await page.until(f"{STEP} === '2' && {ROWS}.join() === '2,1'")
        assert "loss 0.25" in await page.look("document.querySelector('tr.now').innerText")
        assert "serving" in await page.look("document.querySelector('tr.now').innerText")
        bad = weights(3)
        bad["two.weight"][0, 0] = math.nan
        await save(run, {"model": bad}, 3)
        quarantined = "document.querySelector('tr[data-step=\"3\"] .tag.bad')"
        await page.until(f"{quarantined} && {quarantined}.textContent === 'quarantined'")
        assert "NaN" in await page.look("document.querySelector('tr[data-step=\"3\"] .why').textContent")
        assert await page.look("document.querySelectorAll('#chart g').length") == 3
        assert await page.look("document.getElementById('chart').getBoundingClientRect().height") > 100
        assert await page.look("document.querySelectorAll('#chart .cross').length") == 2
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(url + "/aiockpt/rollback", headers=ORDER)).status_code == 200
        await page.until(f"{STEP} === '1'")
        # Streams end and are opened anew, behind the reader's back.
        streams = len([address for address in page.requests if address.endswith("/events")])
        await waited(lambda: len([a for a in page.requests if a.endswith("/events")]) > streams, 20)
        commit(run, 4)
        await page.until(f"{STEP} === '4'")
        assert await page.look("window.same")
        assert await page.look("document.getElementById('link').className") == "live"
        await page.call("Page.navigate", url="about:blank")


@pytest.mark.slow
async def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Metrics, reasons and paths are written by others: no markup of theirs is ever parsed; dark as well."""
    run = tmp_path / "<img src=x onerror=alert(1)>"
    evil = "<script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
    await save(run, {"model": weights(1)}, 1, metrics={evil[:30]: 1.0, "nan": math.nan})

    def refuse(model: Net) -> None:
        if 2.0 in model.versions():
            raise ValueError(evil)

    reloader = reloader_of(run, validate=refuse)
    async with watched(tmp_path, reloader, dark=True, width=420) as (page, _):
        await page.until(f"{STEP} === '1'")
        commit(run, 2)
        await page.until("document.querySelector('.why')")
        assert evil[:20] in await page.look("document.body.innerText")
        assert await page.look("window.evil === undefined")
        assert await page.look("document.querySelectorAll('img, main script').length") == 0
        assert await page.look("document.documentElement.scrollWidth <= 420")
        colour = await page.look("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", colour)[:3]) < 60
        await page.call("Page.navigate", url="about:blank")
