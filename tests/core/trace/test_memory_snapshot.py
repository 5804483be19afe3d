"""Memory snapshots: PyTorch's own reader takes them, and what they allocate is what the trace has measured."""

import pickle
import pickletools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from l2l_core import EmulatedDevice, Event, Relay, RelayConfig, Trace
from l2l_core.trace.events import MemorySample
from l2l_core.trace.memory_snapshot import BASE_ADDRESS, memory_snapshot

PLAIN = (dict, list, str, int)


@pytest.fixture(scope="module")
def step() -> Trace:
    """A step of a real relay, with the stash on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    config = RelayConfig(micro_batches=3, stash="host")
    loss = lambda out, batch: out.square().mean()  # noqa: E731
    with Relay(model, partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(), list(model), loss, config=config) as relay:
        relay.step((torch.randn(6, 16),))
        return relay.step((torch.randn(6, 16),)).trace


def check_types(value: Any) -> None:
    assert type(value) in PLAIN, type(value)
    for one in [*value.keys(), *value.values()] if type(value) is dict else value if type(value) is list else ():
        check_types(one)


def replayed(actions: list[dict[str, Any]]) -> list[tuple[int, dict[str, int]]]:
    """Time and bytes by category after each moment, from the actions alone; blocks must neither overlap nor go astray."""
    live: dict[int, dict[str, Any]] = {}
    states: list[tuple[int, dict[str, int]]] = []
    (made, *rest) = actions
    for action in rest:
        start, stop = action["addr"], action["addr"] + action["size"]
        assert made["addr"] <= start < stop <= made["addr"] + made["size"]
        if action["action"] == "alloc":
            assert all(stop <= other or start >= other + block["size"] for other, block in live.items())
            live[start] = action
        elif action["action"] == "free_completed":
            assert live.pop(start)["size"] == action["size"]
        used: dict[str, int] = {}
        for block in live.values():
            used[block["category"]] = used.get(block["category"], 0) + block["size"]
        if states and states[-1][0] == action["time_us"]:
            states.pop()
        states.append((action["time_us"], used))
    return states


@pytest.mark.parametrize(("number", "place"), [(0, "device"), (1, "host")])
def test_the_bytes_are_those_of_the_trace(step: Trace, number: int, place: str) -> None:
    states = replayed(memory_snapshot(step)["device_traces"][number])
    measured: dict[int, dict[str, int]] = {}
    for sample in step.memory:
        if sample.place == place:
            measured[round(sample.t_s * 1e6)] = {c: n for c, n in sample.bytes_by_category.items() if n}
    told = {t: used for t, used in states}
    for t, used in measured.items():
        at = max((known for known in told if known <= t), default=None)
        assert (told[at] if at is not None else {}) == used
    assert max(sum(used.values()) for used in told.values()) <= step.peak_bytes(place)


def test_pytorch_reads_it(step: Trace, tmp_path: Path) -> None:
    step.to_memory_snapshot(tmp_path / "step.pickle")
    data = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert "total_reserved" in _memory_viz.segsum(data)
    assert "# stream 0" in _memory_viz.trace(data) or "=" in _memory_viz.trace(data)
    for page in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "snapshot.pickle" in page
    lines: list[str] = []
    _memory_viz.memory(data, format_flamegraph=lambda words: lines.extend(words.splitlines()) or "")
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == sum(s["total_size"] for s in data["segments"])


def test_the_viewer_can_read_the_pickle(step: Trace, tmp_path: Path) -> None:
    step.to_memory_snapshot(tmp_path / "step.pickle")
    content = (tmp_path / "step.pickle").read_bytes()
    (proto,) = [arg for code, arg, _ in pickletools.genops(content) if code.name == "PROTO"]
    assert proto == 4
    check_types(memory_snapshot(step))
    for actions in memory_snapshot(step)["device_traces"]:
        assert "unknown" in {action["category"] for action in actions}


def test_names_say_what_ran(step: Trace) -> None:
    actions = memory_snapshot(step)["device_traces"][0]
    weights = [a["frames"] for a in actions if a["action"] == "alloc" and a["category"] == "weights"]
    assert weights and all(frames[0]["name"] == "weights" for frames in weights)
    assert any("h2d: L 1" in frame["name"] or "compute: " in frame["name"] for frames in weights for frame in frames)


def test_a_part_is_freed_and_gaps_are_filled_again() -> None:
    uses = ({"weights": 100}, {"weights": 100, "stash": 50}, {"weights": 30, "stash": 50}, {"stash": 50, "other": 60})
    memory = [MemorySample(float(t), "device", used) for t, used in enumerate(uses)]
    snapshot = memory_snapshot(Trace.of([Event("compute", "forward", 0.5, 2.5, "A")], memory))
    states = replayed(snapshot["device_traces"][0])
    assert [used for _, used in states] == list(uses)
    (device, host) = snapshot["segments"]
    assert (device["address"], device["total_size"], device["active_size"]) == (BASE_ADDRESS, 150, 110)
    assert [(b["size"], b["state"]) for b in device["blocks"]] == [
        (60, "active_allocated"),
        (40, "inactive"),
        (50, "active_allocated"),
    ]
    assert (host["total_size"], host["blocks"], snapshot["device_traces"][1]) == (0, [], [])


def test_an_empty_trace_and_another_name(tmp_path: Path) -> None:
    assert memory_snapshot(Trace())["device_traces"] == [[], []]
    with pytest.raises(ValueError, match=r"memory snapshots are files \*.pickle"):
        Trace().to_memory_snapshot(tmp_path / "step.json")
