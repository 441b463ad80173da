"""Over HTTP every request keeps the version it began with, to its last byte, and gives it back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
import websockets
from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from aiockpt import Live, Reloader, UsageError, _waking
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live, live_version
from tests.serving import Net, commit, leases, waited
from tests.web import app_of, reloader_of, serving, talking, users


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only polls."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)


# ---------------------------------------------------------------- the plain course


async def test_every_answer_names_its_version(tmp_path: Path) -> None:
    """In two headers, the step and the save; the model that the handler sees is that version's."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with talking(app_of(reloader)) as client:
        for step in (1, 2):
            commit(run, step)
            await reloader.wait_for(step)
            answer = await client.get("/told")
            assert answer.json() == {"step": step, "versions": [step]}
            assert answer.headers["x-aiockpt-step"] == str(step)
            assert answer.headers["x-aiockpt-save-id"] == (await reloader.catalog.get(step)).save_id
            missing = await client.get("/nowhere")
            assert (missing.status_code, missing.headers["x-aiockpt-step"]) == (404, str(step))
        assert users(reloader) == 0
    assert leases(run) == {}
    assert reloader.status()["state"] == "closed"


async def test_a_stream_keeps_its_version(tmp_path: Path) -> None:
    """Across a reload, to its last line; new requests get the new version meanwhile."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    app = app_of(reloader)
    async with talking(app) as client:
        async with client.stream("GET", "/streamed") as answer:
            lines = answer.aiter_lines()
            assert json.loads(await anext(lines)) == {"step": 1, "versions": [1.0]}
            commit(run, 2)
            await reloader.wait_for(2)
            assert (await client.get("/told")).json() == {"step": 2, "versions": [2.0]}
            assert [(v["step"], v["users"]) for v in reloader.status()["draining"]] == [(1, 1)]
            app.state.taps.flow.set()
            assert json.loads(await anext(lines)) == {"step": 1, "versions": [1.0]}
            assert [line async for line in lines] == []
            assert answer.headers["x-aiockpt-step"] == "1"
        await waited(lambda: not reloader.status()["draining"])


async def test_a_client_that_leaves_gives_its_version_back(tmp_path: Path) -> None:
    """In the middle of a stream, though the handler would wait for ever."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    app = app_of(reloader)
    async with talking(app) as client:
        async with client.stream("GET", "/streamed") as answer:
            await anext(answer.aiter_lines())
            assert users(reloader) == 1
        await waited(lambda: users(reloader) == 0)
        await waited(lambda: app.state.taps.ended == 1)


async def test_a_handler_that_fails_gives_it_back(tmp_path: Path) -> None:
    """And the error is the server's to answer, as ever."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with talking(app_of(reloader)) as client:
        assert (await client.get("/broken")).status_code == 500
        assert users(reloader) == 0


async def test_a_request_that_is_cancelled_gives_it_back(tmp_path: Path) -> None:
    """As a server does that ends with requests under way."""
    run = tmp_path / "run"
    commit(run, 1)
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with reloader_of(run) as reloader:
        await reloader.ready()
        inside = ReloaderMiddleware(app, reloader)
        scope = {"type": "http", "path": "/x", "method": "GET", "headers": []}
        task = asyncio.create_task(inside(scope, asyncio.Event().wait, asyncio.sleep))  # type: ignore[arg-type]
        await begun.wait()
        assert users(reloader) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert users(reloader) == 0


async def test_a_websocket_keeps_its_version_for_its_life(tmp_path: Path) -> None:
    """However many versions come meanwhile; it is given back when either side closes."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run, drain_timeout=0)
    async with serving(app_of(reloader)) as url:
        await reloader.ready()
        async with websockets.connect(url.replace("http", "ws") + "/socketed", proxy=None) as socket:
            assert socket.response is not None
            assert socket.response.headers["x-aiockpt-step"] == "1"
            for step in (2, 3):
                commit(run, step)
                await reloader.wait_for(step)
                await socket.send("and now?")
                assert json.loads(await socket.recv()) == {"step": 1, "versions": [1.0]}
            assert users(reloader) == 1
        await waited(lambda: users(reloader) == 0)


async def test_work_after_the_answer_has_no_model(tmp_path: Path) -> None:
    """The version goes with the last byte, not with what a framework does in the background."""
    run = tmp_path / "run"
    commit(run, 1)
    seen: list[Any] = []
    done = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"so far", "more_body": True})
        seen.append(users(reloader))
        await send({"type": "http.response.body", "body": b"."})
        seen.append(users(reloader))
        with pytest.raises(UsageError, match="inside"):
            _ = live(scope).model
        done.set()

    reloader = reloader_of(run)
    async with reloader, httpx.AsyncClient(transport=_transport(app, reloader)) as client:
        await client.get("http://here/x")
        await done.wait()
    assert seen == [1, 0]


def _transport(app: Any, reloader: Reloader[Any], **options: Any) -> httpx.ASGITransport:
    return httpx.ASGITransport(ReloaderMiddleware(app, reloader, **options))


# ---------------------------------------------------------------- nothing to serve with


async def test_while_nothing_serves(tmp_path: Path) -> None:
    """Requests wait a little and get 503 with Retry-After; a websocket is refused."""
    run = tmp_path / "run"
    reloader = reloader_of(run)
    async with talking(app_of(reloader, wait=0.05)) as client:
        answer = await client.get("/told")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "x-aiockpt-step" not in answer.headers
        with pytest.raises(websockets.InvalidStatus):
            await websockets.connect(str(client.base_url).replace("http", "ws") + "/socketed", proxy=None)
        commit(run, 1)
        await reloader.ready()
        assert (await client.get("/told")).status_code == 200


async def test_the_first_request_waits_for_the_first_version(tmp_path: Path) -> None:
    """Up to `wait` seconds."""
    run = tmp_path / "run"
    reloader = reloader_of(run)
    async with talking(app_of(reloader, wait=20)) as client:
        asked = asyncio.create_task(client.get("/told"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        commit(run, 1)
        assert (await asked).json()["step"] == 1


async def test_requests_that_an_update_in_place_ends(tmp_path: Path) -> None:
    """Before the answer began they get 503; afterwards the connection is cut, not ended politely."""
    run = tmp_path / "run"
    commit(run, 1)
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a part", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    reloader = reloader_of(run, strategy="inplace", on_busy="abort", gate_timeout=0.05)
    async with reloader, _owned(ReloaderMiddleware(app, reloader)) as client:
        for path, step in (("/quiet", 2), ("/begun", 3)):
            begun.clear()
            asked = asyncio.create_task(client.get(path))
            await begun.wait()
            commit(run, step)
            await reloader.wait_for(step)
            if path == "/quiet":
                answer = await asked
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await asked
        assert users(reloader) == 0


@asynccontextmanager
async def _owned(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server without a lifespan of its own."""

    async def around(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})

    async with talking(around) as client:
        yield client


# ---------------------------------------------------------------- FastAPI


def fast(reloader: Reloader[Net]) -> FastAPI:
    """An application of FastAPI with both kinds of dependency."""
    app = FastAPI(lifespan=lifespan(reloader))
    app.add_middleware(ReloaderMiddleware, reloader=reloader)

    @app.get("/plain")
    def plain(found: Annotated[Live[Net], Depends(live)]) -> Any:
        return {"step": found.step, "versions": sorted(found.model.versions())}

    @app.get("/awaited")
    async def awaited(found: Annotated[Live[Net], Depends(live_version)], request: Request) -> Any:
        assert request.state.aiockpt is found
        return {"step": found.step, "versions": sorted(found.model.versions())}

    @app.get("/streamed")
    async def streamed(found: Annotated[Live[Net], Depends(live_version)]) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for _ in range(20):
                yield json.dumps({"step": found.step, "versions": sorted(found.model.versions())}) + "\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(lines())

    @app.websocket("/socketed")
    async def socketed(websocket: WebSocket, found: Annotated[Live[Net], Depends(live_version)]) -> None:
        await websocket.accept()
        await websocket.send_json({"step": found.step, "versions": sorted(found.model.versions())})
        await websocket.close()

    return app


async def test_with_fastapi(tmp_path: Path) -> None:
    """As a dependency of plain and async handlers, of streams and of websockets."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with talking(fast(reloader)) as client:
        for path in ("/plain", "/awaited"):
            assert (await client.get(path)).json() == {"step": 1, "versions": [1.0]}
        async with client.stream("GET", "/streamed") as answer:
            lines = answer.aiter_lines()
            told = [await anext(lines)]
            commit(run, 2)
            await reloader.wait_for(2)
            told += [line async for line in lines]
        assert [json.loads(line) for line in told] == [{"step": 1, "versions": [1.0]}] * 20
        url = str(client.base_url).replace("http", "ws") + "/socketed"
        async with websockets.connect(url, proxy=None) as socket:
            assert json.loads(await socket.recv()) == {"step": 2, "versions": [2.0]}
        await waited(lambda: users(reloader) == 0)


async def test_beneath_middleware_that_runs_the_application_in_another_task(tmp_path: Path) -> None:
    """Starlette's base class for middleware does."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    app = fast(reloader)

    class Outer(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            answer = await call_next(request)
            answer.headers["x-outer"] = "here"
            return answer

    app.add_middleware(Outer)  # around ours, and then another of ours around it
    app.add_middleware(ReloaderMiddleware, reloader=reloader)
    async with talking(app) as client:
        answer = await client.get("/streamed")
        assert answer.headers["x-outer"] == "here"
        assert {json.loads(line)["step"] for line in answer.text.splitlines()} == {1}
        assert users(reloader) == 0


# ---------------------------------------------------------------- the lifespan


async def test_the_applications_own_lifespan_is_inside(tmp_path: Path) -> None:
    """It finds a reloader that runs, its state reaches the requests, and it ends first."""
    run = tmp_path / "run"
    commit(run, 1)
    order: list[str] = []

    @asynccontextmanager
    async def inner(app: Any) -> AsyncIterator[dict[str, str]]:
        order.append(reloader.status()["state"])
        assert (await reloader.ready()).step == 1
        yield {"greeting": "hello"}
        order.append(reloader.status()["state"])

    reloader = reloader_of(run)
    app = app_of(reloader, inner=inner)

    async def greet(request: Any) -> Any:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(f"{request.state.greeting} {live(request).step}")

    app.add_route("/greet", greet)
    async with talking(app) as client:
        assert (await client.get("/greet")).text == "hello 1"
    assert order == ["starting", "serving"]
    assert reloader.status()["state"] == "closed"


async def test_the_end_waits_for_requests_though_it_is_cancelled(tmp_path: Path) -> None:
    """Twice, and inside a cancelled scope: leases are gone, and the cancellation goes on."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    inside = asyncio.Event()

    async def live_on() -> None:
        async with lifespan(reloader)(None):
            await reloader.ready()
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(live_on())
    await inside.wait()
    use = reloader.use()
    found = await use.__aenter__()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
    assert found.model.versions() == {1.0}
    await use.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leases(run) == {}


@pytest.mark.leaks(reason="a thread is stuck on purpose until the test ends")
async def test_the_end_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A thread that never comes back is told of, and left behind."""
    import threading

    run = tmp_path / "run"
    commit(run, 1)
    entered, release = threading.Event(), threading.Event()

    def stuck(model: Net) -> None:
        entered.set()
        release.wait(30)

    reloader = reloader_of(run, warm_up=stuck)
    try:
        async with asyncio.timeout(20):
            async with lifespan(reloader, timeout=0.2)(None):
                await waited(entered.is_set)
        assert "did not end within 0.2 s" in caplog.text
    finally:
        release.set()


async def test_an_error_of_the_reloader_comes_out_at_the_end(tmp_path: Path) -> None:
    """A model that cannot be built with any checkpoint is a mistake that somebody has to see."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader: Reloader[Any] = Reloader(run, lambda: 3, poll=0.01)
    with pytest.raises(UsageError, match="no torch module"):
        async with lifespan(reloader)(None):
            await waited(lambda: reloader.status()["state"] == "failed")


# ---------------------------------------------------------------- where it is put


async def test_prefix_needs_and_mounts(tmp_path: Path) -> None:
    """The prefix is yours, below a mount as well; what needs no model is let through."""
    run = tmp_path / "run"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        has = "aiockpt" in scope.get("state", {})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(has).encode()})

    async with reloader_of(run) as reloader:
        options: dict[str, Any] = {
            "prefix": "/_m",
            "wait": 0,
            "needs": lambda scope: not scope["path"].startswith("/static"),
        }
        inside = ReloaderMiddleware(app, reloader, **options)
        transport = httpx.ASGITransport(inside)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            assert (await client.get("/static/a.css")).text == "False"
            assert (await client.get("/model")).status_code == 503
            assert (await client.get("/_m/ready")).status_code == 503
            commit(run, 1)
            await reloader.ready()
            assert (await client.get("/model")).text == "True"
            assert (await client.get("/_mother")).text == "True"
            assert (await client.get("/aiockpt/ready")).text == "True"
        rooted = httpx.ASGITransport(inside, root_path="/api")
        async with httpx.AsyncClient(transport=rooted, base_url="http://here") as client:
            assert (await client.get("/api/_m/ready")).json()["step"] == 1


async def test_live_without_the_middleware(tmp_path: Path) -> None:
    """Says what to do."""
    with pytest.raises(UsageError, match="add ReloaderMiddleware"):
        live(Request({"type": "http", "headers": []}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": "status"}, "prefix="),
        ({"prefix": "/status/"}, "prefix="),
        ({"token": "short"}, "at least 16"),
        ({"token": ""}, "at least 16"),
        ({"clients": "everybody"}, "clients="),
        ({"clients": ["10.0.0.300"]}, "10.0.0.300"),
        ({"clients": 3}, "clients="),
        ({"wait": -1}, "wait="),
        ({"wait": True}, "wait="),
        ({"reloader": "runs/digits"}, "reloader="),
    ],
)
async def test_wrong_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """Are refused where they are made."""
    given: dict[str, Any] = {"reloader": reloader_of(tmp_path), **options}
    with pytest.raises(UsageError, match=words):
        ReloaderMiddleware(app_of(reloader_of(tmp_path)), **given)


BARE = """
import asyncio, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "fastapi", "uvicorn", "httpx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from aiockpt.integrations.asgi import ReloaderMiddleware, live
from tests.serving import Net
import aiockpt
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(live(scope).model.versions()).encode()})
async def main():
    async with aiockpt.Reloader(sys.argv[1], Net, poll=0.01) as reloader:
        sent = []
        async def send(message):
            sent.append(message)
        scope = {"type": "http", "path": "/x", "method": "GET", "headers": []}
        await ReloaderMiddleware(app, reloader)(scope, None, send)
        print(sent[0]["headers"][0], sent[1]["body"])
asyncio.run(main())
"""


@pytest.mark.slow
def test_without_any_web_package(tmp_path: Path) -> None:
    """The middleware and `live(scope)` are plain ASGI."""
    commit(tmp_path / "run", 7)
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(b'x-aiockpt-step', b'7') b'{7.0}'"
