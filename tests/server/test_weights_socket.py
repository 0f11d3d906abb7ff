"""The socket for updates of weights: its users, and the messages that are refused."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forge.async_llm import AsyncLLM
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.server.app import create_app
from forge.server.http_server import run_server
from forge.server.weights_socket import (
    MAX_CONNECTIONS,
    MAX_MESSAGE_BYTES,
    WeightsSocket,
    _Refusal,
    open_weights_socket,
)
from forge.trainer_access import TrainerAccess
from forge.weights import SharedWeights

pytestmark = pytest.mark.skipif(
    not hasattr(fcntl, "F_GET_SEALS"), reason="this system has no memory files that are sealed"
)
TIMEOUT_S = 20.0
TENSOR = {"name": "w", "dtype": "float32", "shape": [2, 3], "storage": 0, "offset": 0}
MEMORY = {"kind": "memory", "num_bytes": 32}
CUDA = {
    **{"kind": "cuda", "num_bytes": 32, "offset_bytes": 0, "device_uuid": "none"},
    **{"handle": "00", "ref_counter_handle": "00", "ref_counter_offset": 0},
    **{"event_handle": "00", "event_sync_required": False},
}
BODY = {"key": "admin", "storages": [MEMORY], "tensors": [TENSOR]}


def create_memory(num_bytes: int = 32, seals: int | None = None) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK if seals is None else seals)
    return descriptor


def num_open_memories() -> int:
    """Return how many descriptors of `create_memory` this process has open."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(target.startswith("/memfd:test") for target in targets)


class Message(NamedTuple):
    """What a trainer sends: bytes, and how many descriptors with the first one."""

    content: bytes
    create_descriptors: Callable[[], list[int]] = lambda: [create_memory()]


def frame(text: bytes) -> bytes:
    return len(text).to_bytes(8, "big") + text


def message(**fields: Any) -> Message:
    return Message(frame(json.dumps({**BODY, **fields}).encode()))


def exchange(path: Path, sent: Message) -> dict[str, Any]:
    """Send it and nothing more; return the response."""
    descriptors = sent.create_descriptors()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(path))
            with suppress(BrokenPipeError):  # a refusal may come before the end of the message
                socket.send_fds(connection, [sent.content[:8]], descriptors)
                connection.sendall(sent.content[8:])
                connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                response = file.read()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert len(response) == 8 + int.from_bytes(response[:8], "big")
    found: dict[str, Any] = json.loads(response[8:])
    return found


def run_with_socket(
    path: Path, test: Callable[[AsyncLLM], Awaitable[None]], **options: Any
) -> None:
    """Run the test while an application serves the socket."""

    async def run() -> None:
        llm = AsyncLLM("hash")
        weights_socket = WeightsSocket(str(path), "admin", **options)
        app = create_app(llm, weights_socket=weights_socket)
        async with app.router.lifespan_context(app):
            await test(llm)
        assert not path.exists()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


REFUSED: list[tuple[Message, str, str]] = [
    (message(key="client"), "invalid_api_key", "key: it is wrong"),
    (message(key="client", tensors=[{}]), "invalid_api_key", "key: it is wrong"),
    (message(key=7), "invalid_weights", "key: "),
    (message(key="x" * 4097), "invalid_weights", "key: "),
    (message(weight_version="x" * 129), "invalid_weights", "weight_version: "),
    (message(tensors=[{}] * 100), "invalid_weights", "tensors.0.name: Field required"),
    (message(storages=[{}] * 100), "invalid_weights", "storages.0: Unable"),
    (
        message(**{f"extra {index}": 1 for index in range(100)}),
        *("invalid_weights", "message: 100 fields are wrong or unknown"),
    ),
    (message(extra=1), "invalid_weights", "extra: Extra inputs are not permitted"),
    (message(weight_version=7), "invalid_weights", "weight_version: "),
    (message(tensors=[]), "invalid_weights", "weights: the model hash has no tensors"),
    (message(tensors=[TENSOR, TENSOR]), "invalid_weights", "w: it comes twice"),
    *(
        (message(tensors=[{**TENSOR, name: value}]), "invalid_weights", problem)
        for name, value, problem in (
            ("dtype", "int8", "tensors.0.dtype: "),
            ("dtype", "float32; import os", "tensors.0.dtype: "),
            ("shape", [-1], "tensors.0.shape.0: "),
            ("shape", [2**44, 2**44], "w: its shape has more than"),
            ("shape", [0, 2**44, 2**44, 2**44], "w: its shape has more than"),
            ("shape", [2**44], "w: it ends at byte"),
            ("shape", [3, 3], "w: it ends at byte 36 of a storage of 32"),
            ("shape", [1] * 17, "tensors.0.shape: "),
            ("offset", 3, "w: it ends at byte 36 of a storage of 32"),
            ("offset", -1, "tensors.0.offset: "),
            ("storage", 1, "w: there is no storage 1 among 1"),
            ("name", "", "tensors.0.name: "),
            ("name", 7, "tensors.0.name: "),
        )
    ),
    (message(storages=[MEMORY, MEMORY]), "invalid_weights", "2 are memory, and 1 descriptors"),
    (message(storages=[CUDA]), "invalid_weights", "0 are memory, and 1 descriptors"),
    (message(storages=[{**MEMORY, "num_bytes": 33}]), "invalid_weights", "has 32 bytes, not 33"),
    (message(storages=[{"kind": "pickle"}]), "invalid_weights", "storages.0: "),
    (message(storages=[{**CUDA, "handle": "0g"}]), "invalid_weights", "storages.0.cuda.handle: "),
    (
        message()._replace(create_descriptors=lambda: []),
        *("invalid_weights", "1 are memory, and 0 descriptors"),
    ),
    (
        message()._replace(create_descriptors=lambda: [create_memory(), create_memory()]),
        *("too_many_items", "2 descriptors"),
    ),
    (
        message()._replace(create_descriptors=lambda: [create_memory(seals=0)]),
        *("invalid_weights", "the memory may shrink"),
    ),
    (
        message()._replace(create_descriptors=lambda: [os.open(os.devnull, os.O_RDONLY)]),
        *("invalid_weights", "the memory may shrink"),
    ),
    (Message(frame(b"{")), "invalid_weights", "message: Invalid JSON"),
    (Message(frame(b"")), "invalid_weights", "message: Invalid JSON"),
    (Message(frame(b"\x80\x04N.")), "invalid_weights", "message: Invalid JSON"),
    (Message(frame(json.dumps(BODY).encode())[:-1]), "bad_framing", "ends 1 bytes early"),
    (Message(b"\0\0\0"), "bad_framing", "ends 5 bytes early"),
    (
        Message((MAX_MESSAGE_BYTES + 1).to_bytes(8, "big")),
        *("request_too_large", f"at most {MAX_MESSAGE_BYTES}"),
    ),
]


def test_messages_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    """The socket serves after each, and no descriptor of theirs stays open."""
    path = tmp_path / "weights.sock"

    async def test(llm: AsyncLLM) -> None:
        for sent, code, problem in REFUSED:
            response = await asyncio.to_thread(exchange, path, sent)
            error = response["error"]
            assert error["code"] == code and problem in error["message"], (sent, error)
        assert num_open_memories() == 0
        assert llm.weight_version == "0"
        assert len((await llm.generate("Once")).token_ids) > 0

    run_with_socket(path, test)


def test_only_the_user_of_the_server_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"

    async def test(llm: AsyncLLM) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        error = (await asyncio.to_thread(exchange, path, message()))["error"]
        assert error["code"] == "wrong_user"

    run_with_socket(path, test, peer_uid=lambda connection: os.getuid() + 1)


def test_a_message_has_one_deadline(tmp_path: Path) -> None:
    """The clock goes on by six seconds between two reads, of which there are two."""
    path = tmp_path / "weights.sock"
    times_s = itertools.count(0.0, 6.0)

    async def test(llm: AsyncLLM) -> None:
        error = (await asyncio.to_thread(exchange, path, message()))["error"]
        assert error["code"] == "request_timeout" and "after 10 s" in error["message"]

    run_with_socket(path, test, clock_s=lambda: next(times_s))


def test_connections_that_send_nothing_do_not_delay_others(tmp_path: Path) -> None:
    """As many as are served at once, less one; one of them has sent a part of a message."""
    path = tmp_path / "weights.sock"

    async def test(llm: AsyncLLM) -> None:
        with ExitStack() as exit_stack:
            for _ in range(MAX_CONNECTIONS - 1):
                connection = exit_stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(path))
            connection.sendall(b"\0\0")
            error = (await asyncio.to_thread(exchange, path, message(key="client")))["error"]
            assert error["code"] == "invalid_api_key"

    # The clock stands: no message has a deadline, and a wait for another one has no end.
    run_with_socket(path, test, clock_s=lambda: 0.0)


def test_a_connection_that_is_open_at_the_end_is_refused_at_once(tmp_path: Path) -> None:
    """Its message is incomplete. One that comes after `stop` is not updated from either."""
    path = tmp_path / "weights.sock"

    async def test() -> None:
        weights_socket = WeightsSocket(str(path), "admin", clock_s=lambda: 0.0)
        async with AsyncLLM("hash") as llm:
            weights_socket.start(llm, asyncio.get_running_loop())
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(str(path))
                connection.sendall(b"\0")
                while not weights_socket._connections:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(weights_socket.close)
                with connection.makefile("rb") as file:
                    error = json.loads(file.read()[8:])["error"]
                assert error["code"] == "shutting_down"
                assert not weights_socket._connections and not path.exists()
            with pytest.raises(_Refusal, match="shutting down"):
                weights_socket._update(llm, asyncio.get_running_loop(), SharedWeights((), ()), None)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


class ObservedSocket(WeightsSocket):
    """WeightsSocket that keeps on which threads it was stopped."""

    def __init__(self, path: str, admin_key: str) -> None:
        super().__init__(path, admin_key)
        self.threads: list[threading.Thread] = []

    def stop(self) -> None:
        self.threads.append(threading.current_thread())
        super().stop()


def test_the_socket_stops_when_the_shutdown_begins(tmp_path: Path) -> None:
    """On the thread of the event loop, before open requests are waited for."""
    weights_socket = ObservedSocket(str(tmp_path / "weights.sock"), "admin")
    run_server(
        AsyncLLM("hash"),
        host="127.0.0.1",
        port=0,
        api_keys=(),
        served_model_name=None,
        on_ready=lambda url: signal.raise_signal(signal.SIGTERM),
        weights_socket=weights_socket,
    )
    assert weights_socket.threads[0] is threading.main_thread()
    assert len(weights_socket.threads) == 2


def test_a_failed_start_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_ADMIN_KEY", "admin")
    path = tmp_path / "weights.sock"
    options = ["--weights-socket", str(path), "--otlp-traces-endpoint", "x"]
    assert main(["serve", "hash", *options]) == 2
    assert "--otlp-traces-endpoint" in capsys.readouterr().err
    assert not path.exists()


class FailingListener:
    """Listener that has no descriptor for the first connection, as after EMFILE."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._errors = [OSError(errno.EMFILE, "Too many open files")]

    def accept(self) -> Any:
        if self._errors:
            raise self._errors.pop()
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_lack_of_descriptors_does_not_end_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"

    async def test() -> None:
        async with AsyncLLM("hash") as llm:
            weights_socket = WeightsSocket(str(path), "admin")
            listener = FailingListener(weights_socket._listener)
            weights_socket._listener = listener  # type: ignore[assignment]
            weights_socket.start(llm, asyncio.get_running_loop())
            error = (await asyncio.to_thread(exchange, path, message(key="client")))["error"]
            assert error["code"] == "invalid_api_key" and not listener._errors
            await asyncio.to_thread(weights_socket.close)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_the_socket_of_a_later_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    first = WeightsSocket(str(path), "admin")
    path.unlink()
    second = WeightsSocket(str(path), "admin")
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_a_server_with_a_full_backlog_is_in_use(tmp_path: Path) -> None:
    """A start does not wait for it."""
    path = str(tmp_path / "weights.sock")
    with ExitStack() as exit_stack:
        listener = exit_stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                connection = exit_stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(path)
        with pytest.raises(InvalidConfig, match="weights_socket: there is a file"):
            open_weights_socket(path, TrainerAccess("admin", None))


def test_the_kernel_says_who_the_peer_is(tmp_path: Path) -> None:
    """Of a socket pair both ends are this process."""
    from forge.server import weights_socket

    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert weights_socket._peer_uid(one) == os.getuid()


def test_a_socket_of_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    """That of one which listens, and every other file, stays."""
    path, access = tmp_path / "weights.sock", TrainerAccess("admin", None)
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    first = open_weights_socket(str(path), access)
    assert first is not None
    with pytest.raises(InvalidConfig, match="weights_socket: there is a file"):
        open_weights_socket(str(path), access)
    first.close()
    path.write_text("mine")
    with pytest.raises(InvalidConfig, match="weights_socket: there is a file"):
        open_weights_socket(str(path), access)
    assert path.read_text() == "mine"
    for bad in (str(tmp_path / "none" / "x"), str(tmp_path / ("x" * 200)), "a\0b"):
        with pytest.raises(InvalidConfig, match=r"weights_socket: .* cannot be made"):
            open_weights_socket(bad, access)


def test_a_socket_needs_the_admin_key(tmp_path: Path) -> None:
    assert open_weights_socket(None, None) is None
    with pytest.raises(InvalidConfig, match="weights_socket: it is empty"):
        open_weights_socket("", TrainerAccess("admin", None))
    with pytest.raises(InvalidConfig, match=r"weights_socket: .* Give admin_key too"):
        open_weights_socket(str(tmp_path / "weights.sock"), None)
