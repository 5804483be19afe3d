"""One rank: a process that trains in a session of its own, does what it is asked to, and tells how it stands.

It lives as long as the other end of its pipe: when that is gone, with a kernel that was killed or restarted, it ends at once.
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

HZ, CPU_SHARE = 10.0, 0.03  # at most so many messages a second, and of a core for them
_IDLE_WAIT_S = 0.5  # between two looks where nothing happens
_REFUSABLE = ("edit", "undo", "redo", "fork", "switch", "discard")  # verbs that leave everything as it was, and say why


def run_rank(
    train: Callable[[], Session], rank: int, count: int, port: int, pipe: multiprocessing.connection.Connection
) -> None:
    """Be a rank, from the beginning of its process to the end.

    Args:
        train: makes the session.
        rank, count: of this one, and how many there are.
        port: of the store through which the process group is made, on this machine.
        pipe: to whoever steers.
    """
    # An interrupted cell: that is for the kernel, whose children get it too
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
        dist.barrier()  # whoever ends first must not take connections away that others still use
        dist.destroy_process_group()
    except RuntimeError:
        os._exit(1)  # another rank is gone, and PyTorch's threads would wait for it


class RankServer:
    """Does one thing after another, in the order in which it is asked, and tells how the session stands.

    Invariant: one message is sent at a time, and how things stand after something is told before it is answered.

    Args:
        session: over the relay of this rank.
        pipe: to whoever steers.
    """

    def __init__(self, session: Session, pipe: multiprocessing.connection.Connection) -> None:
        self._session, self._pipe = session, pipe
        self._executor = ThreadPoolExecutor(1, "asked")
        self._send_lock, self._ended = threading.Lock(), threading.Event()
        self._sent_step: ShownStep | None = None  # that was sent last

    def serve(self) -> None:
        """Serve until asked to end."""
        teller = threading.Thread(target=self._send_updates, name="tell", daemon=True)
        teller.start()
        try:
            while asked := self._pipe.recv_bytes():
                self._executor.submit(self._handle_request, asked)
        except (EOFError, OSError):
            os._exit(1)  # in the middle of a step too: nobody is left to train for
        self._executor.shutdown(wait=True)
        self._ended.set()
        self._session.close()
        self._session.relay.close()
        teller.join()

    def _handle_request(self, data: bytes) -> None:
        number, before = -1, self._session.snapshot().failure
        try:
            ask: RankRequest = pickle.loads(data)
            number = ask.number
            getattr(self._session, ask.method)(*ask.args, **ask.options)
            now = self._session.wait()
            refused = now.refusal.message if now.refusal is not None and ask.method in _REFUSABLE else ""
            answer = RankResponse(number, now.failure if now.failure is not before else None, refused)
        except Exception as error:
            answer = RankResponse(number, refused=f"{type(error).__name__}: {error}")
        self._send_snapshot()
        self._send_response(answer)

    # -- telling -------------------------------------------------------------------------------------------------------

    def _send_updates(self) -> None:
        """Send what is new, rarely enough that training does not notice."""
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
            snapshot = self._session.snapshot()  # here: an older one must not follow a newer one
            same = snapshot.shown is not None and snapshot.shown is self._sent_step
            try:
                data = pickle.dumps(SnapshotMessage(replace(snapshot, shown=None) if same else snapshot, same))
            except Exception as error:  # an edit with a module that cannot be pickled, say
                data = pickle.dumps(_rank_failure(error))
            self._sent_step = snapshot.shown
            self._write(data)

    def _send_response(self, response: RankResponse) -> None:
        with self._send_lock:
            self._write(pickle.dumps(response))

    def _write(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError:
            os._exit(1)


def _join_group(rank: int, count: int, port: int) -> None:
    # As torchrun sets them, for what a training function asks; on loopback: ranks of one machine need no network
    names = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}})
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _check_session(made: object, count: int) -> Session:
    if not isinstance(made, Session):
        raise TypeError(
            f"train returned a {type(made).__name__}: it must return a workbench.Session over the rank's relay"
        )
    if made.relay.workers != count:
        raise ValueError(
            f"train made a relay of {made.relay.workers} worker(s), and {count} ranks were started: make it with "
            "Relay(..., workers=Workers())"
        )
    return made


def _rank_failure(error: BaseException) -> RankFailure:
    return RankFailure(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
