"""A relay has threads, which a fork leaves behind: in a forked child it refuses at once; a spawned process makes its own."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S
from small import make_batch, make_gpt, make_relay

from l2l_core import Drop, EmulatedDevice, Relay, RelayConfig

VERBS: dict[str, Callable[[Relay], Any]] = {
    "step": lambda relay: relay.step(make_batch()),
    "forward": lambda relay: relay.forward(make_batch()),
    "evaluate": lambda relay: relay.evaluate(make_batch()),
    "verify": lambda relay: relay.verify(make_batch()),
    "forecast": lambda relay: relay.forecast(make_batch()),
    "expect": lambda relay: relay.expect(make_batch()),
    "save": lambda relay: relay.save(tempfile.gettempdir() + "/never"),
    "apply": lambda relay: relay.apply(Drop(1)),
    "undo": lambda relay: relay.undo(),
    "redo": lambda relay: relay.redo(),
    "fork": lambda relay: relay.fork("other"),
    "switch": lambda relay: relay.switch("main"),
    "discard": lambda relay: relay.discard("main"),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def in_child(do: Callable[[], object]) -> str:
    """Run `do` in a forked child; return how it ended: the error, or its result."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            signal.alarm(int(HANG_S))  # a child that hangs ends with the signal
            try:
                story = f"gave {do()}"
            except BaseException as error:
                story = f"{type(error).__name__}: {error}"
            os.write(write, story.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        story = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert not status, f"the child ended with status {status}"
    return story


@pytest.mark.parametrize("verb", VERBS)
def test_a_forked_child_is_refused_at_once(verb: str) -> None:
    with make_relay(make_gpt()) as relay:
        relay.step(make_batch())
        story = in_child(lambda: VERBS[verb](relay))
        assert story.startswith("RuntimeError: this relay was made in process"), story
        assert "get_context('spawn')" in story, story
        assert relay.step(make_batch()).loss > 0  # and nothing has happened to the parent's


def test_a_device_of_the_parent_is_refused_too() -> None:
    device = EmulatedDevice()
    with make_relay(make_gpt()) as first:
        first.step(make_batch())
    with Relay(make_gpt(), device=device, config=RelayConfig(micro_batches=2)) as relay:
        relay.step(make_batch())

        def train() -> object:
            return Relay(make_gpt(), device=device).step(make_batch())

        assert "stayed behind" in in_child(train)


def test_closing_in_a_child_leaves_the_parents_files_alone() -> None:
    with make_relay(make_gpt()) as relay:
        relay.step(make_batch())
        weights = [param.detach().clone() for param in relay.model.parameters()]
        relay.apply(Drop(1, park="disk"))
        assert in_child(relay.close) == "gave None"
        relay.undo()
        assert all(torch.equal(a, b) for a, b in zip(relay.model.parameters(), weights, strict=True))


def test_a_relay_made_after_the_fork_works() -> None:
    expected = losses()
    assert in_child(losses) == f"gave {expected}"


def test_a_relay_in_a_spawned_process_works(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(send,), daemon=True)
    process.start()
    try:
        assert receive.poll(HANG_S), "the spawned process said nothing"
        assert receive.recv() == losses()
    finally:
        process.join(HANG_S)
    assert process.exitcode == 0


def _train(send: Any) -> None:
    torch.set_num_threads(1)
    send.send(losses())


def losses() -> list[float]:
    with make_relay(make_gpt()) as relay:
        return [relay.step(make_batch(seed)).loss for seed in range(2)]
