"""The capture endpoint as a Serve deployment: sessions by streaming calls, their HTTP on a port of each replica's own.

Guarantees: a session lasts exactly as long as its `open_session` call, so Serve counts, scales and drains sessions; a call that is
cancelled, or whose lease runs out, closes its session; what reaches this deployment through Serve's HTTP route is passed on, streaming,
to the replica that owns the session.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from molt_ray.capture.dialect import dialect_of, error_body
from molt_ray.capture.server import bind, start
from molt_ray.capture.session import Session, SessionError, SessionIds, Sessions
from molt_ray.config import Config
from molt_ray.engine.calls.image_sender import ImageSender
from molt_ray.handles import handle_of
from molt_ray.images import Image, ImageTokens
from molt_ray.names import DEPLOYMENTS
from molt_ray.resources import CAPTURE_CPUS
from serve_apps.engine import with_variables

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

REAP_S = 1.0
PIECE = 1 << 20  # bytes of one streamed piece of the segments; gRPC takes up to 4 MiB
CONNECT_TIMEOUT_S = 10.0
LETTING_GO_S = 10.0  # for the requests of a closed session to end
HOP_HEADERS = {"host", "connection", "keep-alive", "transfer-encoding", "upgrade", "content-length"}


@serve.deployment(name=DEPLOYMENTS["capture"], graceful_shutdown_wait_loop_s=0.2)
class Capture:
    """One replica: vLLM's API application over the sessions that it owns."""

    async def __init__(self, config: Config, secret: bytes) -> None:
        from molt_ray.engine.api.app import build_gate  # imports vllm: 8 to 12 s

        handle = handle_of(config.run.name, "engine")
        # gRPC: 0.2 ms a streamed item instead of 1.2 through the object store. No references travel here: they would leak.
        self.engine = handle.options(stream=True, _by_reference=False)
        self.sender = ImageSender(self.engine)
        sock = bind(config.capture.host)
        owner = f"{advertised(config)}:{sock.getsockname()[1]}"
        self.ids = SessionIds(secret)
        self.lease_s = config.capture.lease_s
        self.sessions = Sessions(
            self.ids,
            owner,
            lease_s=config.capture.lease_s,
            keep_thinking=config.capture.keep_thinking,
            train_abandoned=config.capture.train_abandoned,
        )
        gate = await build_gate(config, self.sessions, self.stream, self.images)
        self.server, self.serving = await start(gate, sock)
        self.reaping = asyncio.create_task(self.reap())
        # A forwarded request lasts as long as its generation: only reaching the owner has a deadline.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self.http = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None))

    async def open_session(self, meta: dict[str, Any]) -> AsyncIterator[Any]:
        """First where the session is and its key, then, once it was closed, its segments and breaks in pickled pieces."""
        session = self.sessions.open(meta)
        try:
            yield {
                "session_id": session.id,
                "session_url": f"http://{self.sessions.owner}/s/{session.id}",
                "api_key": session.key,
                "lease_s": self.lease_s,
            }
            await session.closed.wait()
            await let_go(session)
            whole = pickle.dumps((session.tree.segments(), session.tree.breaks), protocol=5)
            for at in range(0, len(whole), PIECE):
                yield whole[at : at + PIECE]
        finally:
            self.sessions.close(session)

    async def stream(
        self, prompt: Any, params: SamplingParams, request_id: str, group_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """One call of the engine that the group is bound to. Closing this iterator aborts it there."""
        outputs = self.engine.options(session_id=group_id).stream.remote(prompt, params, request_id, **options)
        try:
            async for output in outputs:
                yield output
        except Exception:
            self.sender.forget(group_id)
            raise
        finally:
            outputs.cancel()

    async def images(self, images: Sequence[Image], group_id: str) -> list[ImageTokens]:
        """Gives the group's engine the images that it lacks."""
        return await self.sender.send(images, group_id)

    async def reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            self.sessions.reap()

    async def __call__(self, request: Request) -> Response:
        """Serve's own route, for agents outside the cluster."""
        _, _, rest = request.url.path.partition("/s/")
        session_id, _, route = rest.partition("/")
        try:
            owner = self.ids.owner(session_id)
        except SessionError as e:
            return refusal(request, route, e.status, e.message)
        headers = {name: value for name, value in request.headers.items() if name not in HOP_HEADERS}
        query = f"?{request.url.query}" if request.url.query else ""
        url = f"http://{owner}/s/{rest}{query}"
        content = request.stream() if request.method == "POST" else None
        outgoing = self.http.build_request(request.method, url, headers=headers, content=content)
        try:
            answer = await self.http.send(outgoing, stream=True)
        except httpx.TransportError as e:
            return refusal(request, route, 410, f"the replica that owned this session is gone ({type(e).__name__})")
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_HEADERS}
        return StreamingResponse(passed_on(answer), status_code=answer.status_code, headers=kept)

    async def check_health(self) -> None:
        if self.serving.done():
            raise RuntimeError("the session port's HTTP server has ended")

    async def __del__(self) -> None:
        self.reaping.cancel()
        self.server.should_exit = self.server.force_exit = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.serving, LETTING_GO_S)


async def let_go(session: Session) -> None:
    """Waits for the requests of a closed session to end; one that does not counts as aborted."""
    ending = [asyncio.ensure_future(exchange.done.wait()) for exchange in session.running]
    if ending:
        _, late = await asyncio.wait(ending, timeout=LETTING_GO_S)
        for task in late:
            task.cancel()


async def passed_on(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def refusal(request: Request, route: str, status: int, message: str) -> JSONResponse:
    dialect = dialect_of(route, anthropic="anthropic-version" in request.headers)
    return JSONResponse(error_body(dialect, status, message), status_code=status)


def advertised(config: Config) -> str:
    """The address in session URLs."""
    if config.capture.advertise_host:
        return config.capture.advertise_host
    if config.capture.host in ("0.0.0.0", "::"):
        return ray.util.get_node_ip_address()
    return config.capture.host


def app(config: Config) -> serve.Application:
    """The application `<run.name>-capture`."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Capture.options(
        num_replicas=config.capture.num_replicas,
        max_ongoing_requests=100_000,  # a session is one call, and waits for nothing of Serve's
        graceful_shutdown_timeout_s=config.rollout.timeout_s * (1 + config.rollout.max_retries),
        health_check_timeout_s=60,
        max_constructor_retry_count=3,
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": CAPTURE_CPUS, "runtime_env": with_variables(variables)},
    ).bind(config, secrets.token_bytes(32))
