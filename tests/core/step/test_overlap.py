"""Copies that run while the device computes: same bits on a slow link, nothing read too early, nothing moved too late."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from deep_models import Chain, Recurring, chain_batch, gpt2, padded_batch, squared_error
from oracle import assert_equal, assert_state, both, copy_state
from patience import HANG_S, rarely, wait_until
from torch import nn
from zoo import BY_NAME, Kind

from l2l_core import EmulatedDevice, Relay, RelayConfig, TornStep
from l2l_core.devices.device import Copy, RecordFn, Ticket
from l2l_core.eps.blocks import Unit
from l2l_core.step.traffic import MemoryMeter
from l2l_core.step.traffic.lanes import Lane
from l2l_core.trace.events import Event
from l2l_core.trace.trace import Trace

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
KINDS = ("chain", "gpt2", "t5", "resnet", "qwen3_moe", "lstm_stack", "unet", "tied_gpt2")
few_kinds = pytest.mark.parametrize("kind", [BY_NAME[name] for name in KINDS if name in BY_NAME], ids=str)
stashes = pytest.mark.parametrize("stash", ["device", "host"])


class SlowLink(EmulatedDevice):
    """Every copy begins a moment after it was issued and takes its time, so that whoever does not wait reads old bytes."""

    def __init__(self, latency_s: float = 1e-3) -> None:
        super().__init__()
        self.delay_s = latency_s

    def _run(self, lane: str, copies: Sequence[Copy], record: RecordFn) -> None:
        time.sleep(self.delay_s)
        super()._run(lane, copies, record)


# -- the same bits ---------------------------------------------------------------------------------------------------


@few_kinds
@stashes
@pytest.mark.parametrize("ahead, micro_batches", [rarely(0, 3), rarely(1, 1), rarely(1, 2), (1, 3), rarely(2, 4)])
def test_a_slow_link_changes_no_bit(kind: Kind, stash: str, ahead: int, micro_batches: int) -> None:
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
    with both(kind, config, device=SlowLink()) as pair:
        assert_equal([pair.step(kind.make_batch(micro_batches + 3, seed)) for seed in range(3)])


@pytest.mark.parametrize("hasty", ["h2d", "d2h"])
def test_a_missing_wait_would_be_noticed(hasty: str) -> None:
    """The test above can fail: without the waits of one lane it does."""

    class Hasty:
        def __init__(self, ticket: Ticket) -> None:
            self._ticket = ticket
            self.abandon = ticket.abandon

        def wait(self) -> None:
            pass

        def join(self) -> None:
            pass

    class Careless(SlowLink):
        def issue(self, lane: str, *args: Any, **options: Any) -> Ticket:
            ticket = super().issue(lane, *args, **options)
            return Hasty(ticket) if lane == hasty else ticket  # type: ignore[return-value]

    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=3), device=Careless(5e-3)) as pair:
        with pytest.raises(Exception):  # noqa: B017, PT011 - other bits, or garbage that stops the step
            assert_equal([pair.step(kind.make_batch(6, seed)) for seed in range(2)])


# -- at the same time ------------------------------------------------------------------------------------------------


class Draining(EmulatedDevice):
    """Remembers what was issued, so that a layer can take exactly as long as the copies that run beside it."""

    def __init__(self) -> None:
        super().__init__(latency_s=1e-3)
        self._issued: list[Ticket] = []

    def issue(self, lane: str, *args: Any, **options: Any) -> Ticket:
        self._issued.append(ticket := super().issue(lane, *args, **options))
        return ticket

    def drain(self) -> None:
        """Wait for all that was issued until now."""
        while self._issued:
            self._issued.pop().join()


class Slow(nn.Module):
    """A layer that computes until all copies that were issued are there, so that order does not depend on the machine."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.meanwhile: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meanwhile()
        return torch.tanh(self.up(x))


class SlowChain(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Slow() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trace_of(until_updated: str = "", **settings: Any) -> Trace:
    """A step's trace. The last recompute of layer 1 waits until the layer `until_updated` is being updated."""
    batch, device, model = (torch.randn(12, 64), torch.randn(12, 64)), Draining(), SlowChain()
    config = RelayConfig(**({"micro_batches": 3} | settings))
    # Without a comparison of losses, whose calls of layers would count.
    with Relay(model, ADAMW, loss=squared_error, loss_over="micro-batch", config=config, device=device) as relay:
        calls = Counter[int]()  # here, since a recompute leaves attributes of the layer as they are

        def meanwhile(layer: int) -> None:
            device.drain()
            calls[layer] += 1
            if until_updated and layer == 1 and calls[layer] % (2 * config.micro_batches) == 0:
                wait_until(lambda: until_updated in {block.key for block in relay.store.updated})

        for number, layer in enumerate(model.layers):
            layer.meanwhile = partial(meanwhile, number)
        relay.step(batch)
        return relay.step(batch).trace


def events_of(trace: Trace, kind: str, layer: str) -> list[Event]:
    return [event for event in trace.events if event.kind == kind and event.layer == layer]


@stashes
def test_the_next_layer_loads_while_one_computes(stash: str) -> None:
    trace = trace_of(stash=stash)
    for here, there in pairwise(("L000", "L001", "L002", "L003")):
        computing, loading = events_of(trace, "forward", here), events_of(trace, "load", there)
        assert loading[0].start_s < computing[-1].stop_s
        assert loading[0].stop_s < events_of(trace, "forward", there)[0].start_s


@stashes
def test_gradients_leave_and_layers_are_updated_while_the_next_one_computes(stash: str) -> None:
    trace = trace_of(until_updated="L003", stash=stash)
    for here, there in pairwise(("L003", "L002", "L001", "L000")):
        assert events_of(trace, "push", here)[0].start_s < events_of(trace, "backward", there)[-1].stop_s
    assert events_of(trace, "update", "L003")[0].start_s < events_of(trace, "backward", "L000")[0].start_s


def test_stash_leaves_and_arrives_while_another_micro_batch_computes() -> None:
    trace = trace_of(stash="host")
    forward = {event.k: event for event in events_of(trace, "forward", "L001")}
    backward = {event.k: event for event in events_of(trace, "backward", "L001")}
    fetched = [event for event in trace.events if event.kind == "fetch" and event.layer == "L001"]
    assert any(event.k == 1 and event.start_s < forward[0].stop_s for event in fetched)
    turned = events_of(trace, "backward", "L002")[-1].stop_s
    assert any(event.k == 1 and turned <= event.start_s < backward[0].stop_s for event in fetched)
    left = [event for event in trace.lanes["d2h"] if event.kind == "stash" and event.k == 0]
    assert any(forward[0].stop_s <= event.start_s < forward[1].stop_s for event in left)


def test_a_single_micro_batch_fetches_nothing_before_the_turn() -> None:
    """And what it fetches then has the number of the visit that it is for."""
    trace = trace_of(stash="host", micro_batches=1)
    turn = events_of(trace, "forward", "L003")[0].start_s
    fetched = [event for event in trace.events if event.kind == "fetch" and event.layer != "shell"]
    assert {(event.layer, event.visit) for event in fetched} <= {("L002", 5), ("L001", 6), ("L000", 7)}
    assert all(event.start_s >= turn for event in fetched)


@stashes
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_ahead_0_is_serial(stash: str, update: str) -> None:
    """Plain L2L: one thing after another, on whatever lane."""
    events = trace_of(stash=stash, ahead=0, update=update).events
    assert {"load", "push", "update", "forward", "backward"} <= {event.kind for event in events}
    for before, after in pairwise(events):
        assert after.start_s >= before.stop_s - 1e-9, (before, after)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@stashes
def test_events_of_a_lane_follow_one_another(stash: str, ahead: int) -> None:
    for lane, events in trace_of(stash=stash, ahead=ahead).lanes.items():
        for before, after in pairwise(events):
            assert after.start_s >= before.stop_s - 1e-9, (lane, before, after)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """At every event, over the storages themselves: activations, stash and batch, as they are and as they are booked."""
    from l2l_core.step import pass_runtime

    stashes_made: list[Any] = []
    pairs: list[tuple[int, int]] = []
    original, make = MemoryMeter.sample, pass_runtime.Stash

    def sample(meter: MemoryMeter) -> None:
        physical = sum(
            s.nbytes() for held in list(stashes_made[-1].tracker.storages.values()) if (s := held.ref()) is not None
        )
        booked = meter._device.by_category()
        pairs.append((physical, sum(n for name, n in booked.items() if name not in ("weights", "gradients"))))
        original(meter)

    monkeypatch.setattr(pass_runtime, "Stash", lambda *a, **o: stashes_made.append(make(*a, **o)) or stashes_made[-1])
    monkeypatch.setattr(MemoryMeter, "sample", sample)
    return pairs


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("ahead", [0, 1])
@stashes
def test_what_is_booked_is_never_less_than_what_is_there(
    stash: str, ahead: int, micro_batches: int, seen: list[tuple[int, int]]
) -> None:
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash, meter="always")
    options: dict[str, Any] = {"loss": squared_error, "loss_over": "micro-batch"}  # no passes that are not metered
    with Relay(Chain(4), config=config, device=SlowLink(), **options) as relay:
        for _ in range(2):
            relay.step(chain_batch(micro_batches))
    assert len(seen) > 20
    assert all(physical <= booked for physical, booked in seen), seen
    if stash == "device" or ahead == 0:
        assert all(physical == booked for physical, booked in seen), "without a ring, to the byte"


def test_a_layer_that_runs_several_times_is_booked_in_full(seen: list[tuple[int, int]]) -> None:
    """The first step does not know its last run; the others keep that one's graph, and do not replay the first."""
    with Relay(Recurring(), loss=squared_error, config=RelayConfig(micro_batches=3, stash="host")) as relay:
        for _ in range(4):
            relay.step(chain_batch(3))
    assert all(physical <= booked for physical, booked in seen), seen


@stashes
def test_outputs_are_booked_in_full(stash: str, seen: list[tuple[int, int]]) -> None:
    """What an evaluation has counted says nothing of a forward, which keeps its outputs."""
    kind = BY_NAME["bert"]
    with Relay(kind.make_model(), config=RelayConfig(micro_batches=3, stash=stash)) as relay:
        for run in (relay.evaluate, relay.forward, relay.forward):
            run(kind.make_batch(12, 0))
    assert all(physical <= booked for physical, booked in seen), seen


@pytest.mark.parametrize("meter", ["on_change", "always"])
def test_categories_add_up_to_the_total_at_every_event(meter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = []
    original = MemoryMeter.sample

    def sample(self: MemoryMeter) -> None:
        totals.append(relay.device.ledger.total)
        original(self)

    monkeypatch.setattr(MemoryMeter, "sample", sample)
    config = RelayConfig(micro_batches=3, stash="host", meter=meter, verify="never")
    with Relay(gpt2(3), ADAMW, config=config, loss_over="micro-batch") as relay:  # a step has no other passes
        for _ in range(2):
            totals.clear()
            trace = relay.step(padded_batch(3)).trace
            changes = [n for n, before in zip(totals, [None, *totals], strict=False) if n != before]
            sampled = [sample.total for sample in trace.memory if sample.place == "device"]
            assert len(totals) > 20
            left = iter(sampled)
            assert all(any(total == seen for seen in left) for total in changes), "every total is a sample, in order"


@pytest.mark.parametrize("what", [Relay.evaluate, Relay.forward])
def test_inference_parks_too(what: Callable[..., Any]) -> None:
    """The peak of an inference does not grow with the number of micro-batches, whatever it gives out."""

    def peak(micro_batches: int) -> int:
        config = RelayConfig(micro_batches=micro_batches, stash="host")
        with Relay(gpt2(3), config=config) as relay:
            relay.device.ledger.reset_peak()
            what(relay, padded_batch(micro_batches))
            return relay.device.ledger.peak

    assert peak(16) <= 1.01 * peak(2)


# -- errors ----------------------------------------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("lane", ["h2d", "d2h"])
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_a_copy_that_fails_ends_the_step_and_the_relay_goes_on(lane: str, stash: str, update: str) -> None:
    """Whichever copy it is: an error, no hang, no thread, no byte left, and the next step is right."""

    class Broken(EmulatedDevice):
        left = -1

        def _run(self, name: str, copies: Sequence[Copy], record: RecordFn) -> None:
            if name == lane:
                self.left -= 1
                if self.left == 0:
                    raise OSError("the cable is loose")
            super()._run(name, copies, record)

    kind, device = BY_NAME["chain"], Broken()
    threads = threading.active_count()
    with both(kind, RelayConfig(micro_batches=3, stash=stash, update=update), device=device) as pair:
        batch = kind.make_batch(6, 0)
        issued = len(pair.step(batch).result.trace.lanes[lane])
        for index in range(1, issued + 1, max(1, issued // 6)):
            device.left = index
            state = copy_state(pair.relay.model)
            with pytest.raises(Exception, match="the cable is loose"):
                pair.relay.step(batch)
            assert device.ledger.total == 0
            if update == "deferred":
                assert_state(pair.relay.model, state)
        device.left = -1
        pair.relay.step(batch)
    assert threading.active_count() <= threads


class Interrupted(EmulatedDevice):
    """Somebody presses Ctrl-C while compute waits for a copy: the n-th time, for whatever n."""

    left = -1

    def issue(self, lane: str, *args: Any, **options: Any) -> Ticket:
        ticket = super().issue(lane, *args, **options)
        wait = ticket.wait

        def interrupted() -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            wait()

        ticket.wait = interrupted  # type: ignore[method-assign]
        return ticket


class Frail(EmulatedDevice):
    """The n-th load or fetch fails."""

    left = -1

    def _run(self, lane: str, *args: Any) -> None:
        self.left -= lane == "h2d"
        if self.left == 0:
            raise OSError("the cable is loose")
        super()._run(lane, *args)


@pytest.mark.parametrize("make_device", [Interrupted, Frail])
@pytest.mark.parametrize("ahead", [0, 1])
def test_tensors_that_outlive_a_failed_step_keep_their_values(make_device: Callable[[], Any], ahead: int) -> None:
    """Reading an emptied storage would crash the process."""
    kind, device, kept = BY_NAME["chain"], make_device(), []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append((output, output.detach().clone()))

    with both(kind, RelayConfig(micro_batches=3, ahead=ahead, stash="host", update="deferred"), device=device) as pair:
        for unit in pair.relay.stack:
            unit.module.register_forward_hook(keep)
        batch = kind.make_batch(6, 0)
        pair.step(batch)
        for nth in range(1, 200):
            kept.clear()
            device.left = nth
            try:
                pair.relay.step(batch)
            except (KeyboardInterrupt, OSError):
                pass
            else:
                break
            assert all(output.untyped_storage().nbytes() == value.nbytes for output, value in kept), nth
            assert all(torch.equal(output.detach(), value) for output, value in kept), nth
        assert nth > 30


def test_an_interrupt_that_comes_as_parameters_are_pointed_leaves_them_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    left, point = 0, Unit.set_data

    def interrupted(unit: Unit, views: Sequence[torch.Tensor]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            point(unit, [*views[:1], *(param.data for param in unit.params[1:])])  # it came after the first
            raise KeyboardInterrupt
        point(unit, views)

    monkeypatch.setattr(Unit, "set_data", interrupted)
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2, update="deferred")) as pair:
        for nth in range(1, 100):
            left = nth
            try:
                pair.relay.step(kind.make_batch(6, 0))
            except (KeyboardInterrupt, TornStep):  # the last of all comes after the updates
                left = 0
                pair.relay.forward(kind.make_batch(6, 0))
            else:
                break
        assert nth > 8


# -- lanes -----------------------------------------------------------------------------------------------------------


class Recorder(EmulatedDevice):
    """Notes what is issued."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, int]] = []

    def issue(self, lane: str, copies: Sequence[Copy], *args: Any, **options: Any) -> Ticket:
        self.issued.append((lane, sum(target.nbytes for target, _ in copies)))
        return super().issue(lane, copies, *args, **options)


@pytest.fixture
def recorder() -> Any:
    device = Recorder()
    yield device
    device.close()


def flat(*numels: int) -> list[Copy]:
    return [(torch.zeros(n), torch.arange(n, dtype=torch.float32)) for n in numels]


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("numels", [(100_000,), (70_000, 3, 40_001), (5,), (0, 50_000)])
def test_a_trickle_sends_every_byte_once(recorder: Recorder, pieces: int, numels: tuple[int, ...]) -> None:
    lane, copies = Lane(recorder, Trace(), "h2d", pieces), flat(*numels)
    ticket = lane.send_chunked("load", "L000", copies)
    assert len(recorder.issued) == 1, "the first piece goes at once"
    for _ in range(pieces - 1):
        lane.send_chunk()
    ticket.wait()
    assert len(recorder.issued) <= pieces
    assert sum(nbytes for _, nbytes in recorder.issued) == 4 * sum(numels)
    for target, source in copies:
        assert torch.equal(target, source)
    sizes = [nbytes for _, nbytes in recorder.issued]
    assert max(sizes) - min(sizes) <= 4


def test_whoever_waits_sends_out_the_rest(recorder: Recorder) -> None:
    copies = flat(100_000)
    Lane(recorder, Trace(), "h2d", 4).send_chunked("load", "L000", copies).wait()
    assert len(recorder.issued) == 4
    assert torch.equal(*copies[0])


def test_another_trickle_sends_out_the_rest_of_the_first(recorder: Recorder) -> None:
    lane = Lane(recorder, Trace(), "h2d", 4)
    first = lane.send_chunked("load", "L000", flat(100_000))
    lane.send_chunked("load", "L001", flat(100_000))
    assert len(recorder.issued) == 5
    first.wait()
    assert len(recorder.issued) == 5


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_another_thread_waits_for_the_last_piece(recorder: Recorder) -> None:
    lane, copies = Lane(recorder, Trace(), "d2h", 4), flat(100_000)
    ticket = lane.send_chunked("push", "L000", copies)
    thread, errors = in_thread(ticket.join)
    thread.join(0.05)
    assert thread.is_alive() and len(recorder.issued) == 1
    lane.flush()
    thread.join(HANG_S)
    assert not thread.is_alive() and not errors
    assert torch.equal(*copies[0])


def test_a_trickle_that_is_given_up_frees_who_waits_for_it(recorder: Recorder) -> None:
    lane = Lane(recorder, Trace(), "d2h", 4)
    ticket = lane.send_chunked("push", "L000", flat(100_000))
    thread, errors = in_thread(ticket.join)
    ticket.abandon()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert "cancelled" in str(errors[0])
    lane.flush()
    assert len(recorder.issued) == 1


def test_a_piece_that_cannot_be_sent_is_missed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may take a gradient for complete whose last piece was never sent."""

    def refuse(*args: Any, **options: Any) -> Ticket:
        raise OSError("no")

    lane = Lane(recorder, Trace(), "d2h", 2)
    ticket = lane.send_chunked("push", "L000", flat(100_000))
    thread, errors = in_thread(ticket.join)
    monkeypatch.setattr(recorder, "issue", refuse)
    with pytest.raises(OSError, match="no"):
        lane.flush()
    ticket.abandon()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert "cancelled" in str(errors)
