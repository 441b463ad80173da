"""Health, readiness and orders over HTTP: what they say, and to whom."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiockpt import Catalog, Reloader, _waking
from aiockpt.integrations.asgi import ReloaderMiddleware
from tests.serving import commit, served, waited, weights
from tests.web import ORDER, TOKEN, app_of, reloader_of, talking


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only polls."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that has no pages."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def client_of(
    reloader: Reloader[Any], address: Any = ("127.0.0.1", 1), **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client that comes from some address."""
    inside = ReloaderMiddleware(nothing, reloader, **{"token": TOKEN, **options})
    transport = httpx.ASGITransport(inside, client=address)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


# ---------------------------------------------------------------- health


async def test_health_and_readiness(tmp_path: Path) -> None:
    """Alive from the start, ready once something serves, neither after the end; probes may use HEAD."""
    run = tmp_path / "run"
    reloader = reloader_of(run)
    async with client_of(reloader) as client:
        async with reloader:
            health, ready = await client.get("/aiockpt/health"), await client.get("/aiockpt/ready")
            assert (health.status_code, health.json()["state"]) == (200, "starting")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            assert ready.headers["cache-control"] == "no-store"
            commit(run, 1)
            await reloader.ready()
            ready = await client.get("/aiockpt/ready")
            assert (ready.status_code, ready.json()["step"], ready.json()["ready"]) == (200, 1, True)
            head = await client.head("/aiockpt/ready")
            assert (head.status_code, head.content, head.headers["content-length"] != "0") == (200, b"", True)
            assert (await client.post("/aiockpt/ready")).status_code == 405
        for path in ("health", "ready"):
            ended = await client.get(f"/aiockpt/{path}")
            assert (ended.status_code, ended.json()["state"]) == (503, "closed")


async def test_details_of_what_went_wrong(tmp_path: Path) -> None:
    """A bad checkpoint changes neither health nor readiness; near clients read why, others do not."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with reloader, client_of(reloader) as near, client_of(reloader, ("192.0.2.7", 5)) as far:
        await reloader.ready()
        bad = weights(2)
        bad["two.weight"][0, 0] = math.nan
        commit(run, 2, bad)
        await waited(lambda: reloader.status()["failures"])
        health = await near.get("/aiockpt/health")
        (quarantined,) = health.json()["quarantined"]
        assert (health.status_code, quarantined["step"], quarantined["stage"]) == (200, 2, "finite")
        assert "two.weight" in quarantined["reason"]
        assert (await far.get("/aiockpt/health")).json() == {
            "state": "serving",
            "ready": True,
            "step": 1,
            "save_id": (await reloader.catalog.get(1)).save_id,
        }


async def test_a_reloader_that_has_ended_by_an_error(tmp_path: Path) -> None:
    """Is neither alive nor ready when nothing serves: whoever restarts servers is to know."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader: Reloader[Any] = Reloader(run, lambda: 3, poll=0.01)
    async with client_of(reloader) as client:
        with pytest.raises(Exception, match="no torch module"):
            async with reloader:
                await waited(lambda: reloader.status()["state"] == "failed")
                health = await client.get("/aiockpt/health")
                assert health.status_code == 503
                assert "no torch module" in health.json()["error"]


# ---------------------------------------------------------------- orders


async def test_orders(tmp_path: Path) -> None:
    """Reload, roll back, pin and follow again, over a real server."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run, poll=30)
    async with talking(app_of(reloader)) as client:
        await reloader.ready()

        async def order(name: str, **options: Any) -> Any:
            answer = await client.post(f"/aiockpt/{name}", headers=ORDER, **options)
            return answer.status_code, answer.json()

        commit(run, 2)
        status, answer = await order("reload")
        # The wake-up of a local folder may have been faster than the order.
        assert (status, type(answer["changed"]), answer["serving"]["step"]) == (200, bool, 2)
        assert (await order("reload"))[1]["changed"] is False
        assert (await client.get("/told")).json() == {"step": 2, "versions": [2.0]}
        status, answer = await order("rollback")
        assert (status, answer["step"]) == (200, 1)
        assert (await client.get("/told")).json() == {"step": 1, "versions": [1.0]}
        status, answer = await order("pin", json={"step": 2})
        assert (status, answer["pinned"]) == (200, 2)
        assert (served(reloader), reloader.status()["pinned"]) == (2, 2)
        status, answer = await order("rollback")
        assert (status, answer["kind"]) == (409, "UsageError")
        assert await order("pin", json={"step": None}) == (200, {"pinned": None})
        assert reloader.status()["pinned"] is None


async def test_an_alias_is_moved_by_a_rollback(tmp_path: Path) -> None:
    """So that all replicas follow."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    async with Catalog(run) as catalog:
        await catalog.promote(1)
        reloader = reloader_of(run, follow="alias:production")
        async with reloader, client_of(reloader) as client:
            await reloader.wait_for(1)
            await catalog.promote(2)
            await reloader.wait_for(2)
            assert (await client.post("/aiockpt/rollback", headers=ORDER)).json()["step"] == 1
            assert (await catalog.alias()).step == 1


async def test_orders_that_cannot_be_carried_out(tmp_path: Path) -> None:
    """Leave everything as it was, and say why: no such step, a bad one, nothing to go back to."""
    run = tmp_path / "run"
    commit(run, 3)
    reloader = reloader_of(run, poll=30)
    async with reloader, client_of(reloader) as client:
        await reloader.ready()
        missing = await client.post("/aiockpt/pin", headers=ORDER, json={"step": 77})
        assert (missing.status_code, missing.json()["kind"]) == (404, "StepNotFoundError")
        nowhere = await client.post("/aiockpt/rollback", headers=ORDER)
        assert (nowhere.status_code, nowhere.json()["kind"]) == (404, "StepNotFoundError")
        bad = weights(4)
        del bad["one.bias"]
        commit(run, 4, bad)
        refused = await client.post("/aiockpt/reload", headers=ORDER)
        assert (refused.status_code, refused.json()["kind"]) == (409, "ReloadError")
        assert "one.bias" in refused.json()["error"]
        for body in (b"", b"{", b"[3]", b'{"step":"3"}', b'{"step":true}', b"[" * 4000, b" " * 5000):
            answer = await client.post("/aiockpt/pin", headers=ORDER, content=body)
            assert answer.status_code == 400, body[:20]
        assert (served(reloader), reloader.status()["pinned"]) == (3, None)


@pytest.mark.parametrize("name", ["reload", "rollback", "pin"])
async def test_who_may_give_orders(tmp_path: Path, name: str) -> None:
    """Nobody without a token in the server; from near, with the very token; by POST only."""
    run = tmp_path / "run"
    commit(run, 1)
    path = f"/aiockpt/{name}"
    async with reloader_of(run) as reloader:
        await reloader.ready()
        async with client_of(reloader, token=None) as off:
            for headers in (ORDER, {}, {"authorization": "Bearer "}):
                assert (await off.post(path, headers=headers)).status_code == 404
        async with client_of(reloader) as client:
            assert (await client.get(path, headers=ORDER)).status_code == 405
            wrong: list[dict[str, str]] = [
                {},
                {"authorization": "Bearer"},
                {"authorization": f"Bearer {TOKEN[:-1]}"},
                {"authorization": f"Bearer {TOKEN}x"},
                {"authorization": f"Basic {TOKEN}"},
                {"authorization": TOKEN},
            ]
            for headers in wrong:
                answer = await client.post(path, headers=headers)
                assert (answer.status_code, "bearer" in answer.headers["www-authenticate"].lower()) == (
                    401,
                    True,
                )
            twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
            assert (await client.post(path, headers=twice)).status_code == 401
        for address in (("192.0.2.7", 5), ("::ffff:192.0.2.7", 5), ("testclient", 5), None):
            async with client_of(reloader, address) as far:
                assert (await far.post(path, headers=ORDER)).status_code == 403
        assert reloader.status()["reloads"] == 1


@pytest.mark.parametrize(
    ("clients", "address", "near"),
    [
        ("loopback", "127.4.5.6", True),
        ("loopback", "::1", True),
        ("loopback", "::ffff:127.0.0.1", True),
        ("loopback", "10.1.2.3", False),
        (["10.0.0.0/8", "fd00::/8"], "10.1.2.3", True),
        (["10.0.0.0/8", "fd00::/8"], "fd00::7", True),
        (["10.0.0.0/8", "fd00::/8"], "127.0.0.1", False),
        ("any", "192.0.2.7", True),
    ],
)
async def test_who_is_near(tmp_path: Path, clients: Any, address: str, near: bool) -> None:
    """By default this machine alone."""
    reloader = reloader_of(tmp_path / "run")
    async with client_of(reloader, (address, 9), clients=clients) as client:
        answer = await client.post("/aiockpt/reload")
        assert answer.status_code == (401 if near else 403)
        assert (await client.get("/aiockpt/status")).status_code == (200 if near else 403)


async def test_orders_take_turns(tmp_path: Path) -> None:
    """Many at once: each is carried out whole, and the server lives on."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    reloader = reloader_of(run, poll=30)
    async with reloader, client_of(reloader) as client:
        await reloader.ready()
        orders = [
            client.post("/aiockpt/pin", headers=ORDER, json={"step": 1 + n % 2})
            if n % 3
            else client.post("/aiockpt/reload", headers=ORDER)
            for n in range(12)
        ]
        answers = await asyncio.gather(*orders)
        assert {answer.status_code for answer in answers} == {200}
        async with reloader.use() as live:
            assert live.model.versions() == {float(live.step)}
