"""The process of one rank: it executes requests on its session and sends snapshots to the parent process.

The process exits at once when the other end of its pipe is closed, for example because the kernel was killed or restarted.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist

from workbench.ranks.messages import RankFailure, RankRequest, RankResponse, SnapshotMessage
from workbench.session import Session, ShownStep

HZ, CPU_SHARE = 10.0, 0.03  # limits for snapshots: messages per second, share of a core
_IDLE_WAIT_S = 0.5
_REFUSABLE = ("edit", "undo", "redo", "fork", "switch", "discard")  # commands that change nothing if they are refused


def run_rank(
    train: Callable[[], Session], rank: int, count: int, port: int, pipe: multiprocessing.connection.Connection
) -> None:
    """Run a rank; the main function of its process.

    Args:
        train: creates the session.
        rank, count: number of this rank, and number of ranks.
        port: local port of the store for the process group.
        pipe: pipe to the parent process.
    """
    # When a cell is interrupted, child processes receive the signal too, and only the kernel must handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        _join_group(rank, count, port)
        session = _check_session(train(), count)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(_rank_failure(error)))
        raise SystemExit(1) from error
    RankServer(session, pipe).serve()
    try:
        dist.barrier()  # no rank may close connections that others still use
        dist.destroy_process_group()
    except RuntimeError:
        os._exit(1)  # another rank has ended, and the threads of PyTorch would wait for it


class RankServer:
    """Executes requests in order, and sends snapshots of the session.

    Invariant: one message is sent at a time, and the snapshot after a request is sent before its response.

    Args:
        session: session of this rank.
        pipe: pipe to the parent process.
    """

    def __init__(self, session: Session, pipe: multiprocessing.connection.Connection) -> None:
        self._session, self._pipe = session, pipe
        self._executor = ThreadPoolExecutor(1, "requests")
        self._send_lock, self._ended = threading.Lock(), threading.Event()
        self._sent_step: ShownStep | None = None  # shown step of the last message

    def serve(self) -> None:
        """Execute requests until the empty message."""
        updates = threading.Thread(target=self._send_updates, name="updates", daemon=True)
        updates.start()
        try:
            while data := self._pipe.recv_bytes():
                self._executor.submit(self._handle_request, data)
        except (EOFError, OSError):
            os._exit(1)  # even during a step: the parent process has ended
        self._executor.shutdown(wait=True)
        self._ended.set()
        self._session.close()
        self._session.relay.close()
        updates.join()

    def _handle_request(self, data: bytes) -> None:
        number, before = -1, self._session.snapshot().failure
        try:
            request: RankRequest = pickle.loads(data)
            number = request.number
            getattr(self._session, request.method)(*request.args, **request.options)
            now = self._session.wait()
            refused = now.refusal.message if now.refusal is not None and request.method in _REFUSABLE else ""
            response = RankResponse(number, now.failure if now.failure is not before else None, refused)
        except Exception as error:
            response = RankResponse(number, refused=f"{type(error).__name__}: {error}")
        self._send_snapshot()
        with self._send_lock:
            self._write(pickle.dumps(response))

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _send_updates(self) -> None:
        """Send new snapshots, within `HZ` and `CPU_SHARE`."""
        sent = -1
        while not self._ended.is_set():
            began_s = time.thread_time()
            snapshot = self._session.snapshot()
            if snapshot.number != sent or snapshot.progress is not None:
                self._send_snapshot()
                sent = snapshot.number
            cost_s = time.thread_time() - began_s
            self._ended.wait(max(1 / HZ, cost_s / CPU_SHARE - cost_s))
            if snapshot.progress is None and snapshot.state != "running":
                self._session.wait_for_change(snapshot.number, _IDLE_WAIT_S)

    def _send_snapshot(self) -> None:
        with self._send_lock:
            snapshot = self._session.snapshot()  # under the lock, so that snapshots are sent in order
            unchanged = snapshot.shown is not None and snapshot.shown is self._sent_step
            try:
                data = pickle.dumps(
                    SnapshotMessage(replace(snapshot, shown=None) if unchanged else snapshot, unchanged)
                )
            except Exception as error:  # for example an edit with a module that cannot be pickled
                data = pickle.dumps(_rank_failure(error))
            self._sent_step = snapshot.shown
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError:
            os._exit(1)


def _join_group(rank: int, count: int, port: int) -> None:
    # The variables of torchrun, for the training function; on loopback, because all ranks are on one machine.
    names = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}})
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _check_session(session: object, count: int) -> Session:
    if not isinstance(session, Session):
        raise TypeError(
            f"train returned a {type(session).__name__}: it must return a workbench.Session with the relay of the rank"
        )
    if session.relay.workers != count:
        raise ValueError(
            f"train returned a relay of {session.relay.workers} worker(s), but {count} ranks were started: create it with "
            "Relay(..., workers=Workers())"
        )
    return session


def _rank_failure(error: BaseException) -> RankFailure:
    return RankFailure(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
