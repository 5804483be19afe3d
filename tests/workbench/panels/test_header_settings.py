"""The header's sliders: they set the next step, and follow what is set elsewhere."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Device, EmulatedDevice, RelayConfig
from workbench.panels.header_panel import HeaderPanel
from workbench.session.session import Session


def test_a_slider_gives_the_next_step_another_setting_once(header: HeaderPanel) -> None:
    session = header.session
    find(header, "micro-batches").value = 3
    session.wait(HANG_S)
    for _ in range(3):
        shown(header)
    find(header, "layers ahead").value = 2
    find(header, "stash on").value = "host"
    session.wait(HANG_S)
    shown(header)
    assert session.relay.config == RelayConfig(micro_batches=3, ahead=2, stash="host")
    assert [change.what for change in session.snapshot().changes] == [
        "micro_batches 2 → 3, ahead 1 → 2, stash device → host"
    ]


def test_controls_follow_settings_that_are_changed_elsewhere_and_do_not_echo(header: HeaderPanel) -> None:
    session = header.session
    session.reconfigure(micro_batches=5, ahead=7, stash="host", h2d_bytes_per_s=3_000_000)  # three are no options
    session.wait(HANG_S)
    for _ in range(2):
        shown(header)
    values = [find(header, words).value for words in ("micro-batches", "layers ahead", "stash on", "emulated link")]
    assert values == [5, 7, "host", 3e6]
    assert find(header, "emulated link").label == "3 MB/s"
    assert find(header, "micro-batches").options[3:6] == (("4", 4), ("5", 5), ("6", 6)), "in order"
    session.wait(HANG_S)
    assert len(session.snapshot().changes) == 1
    session.reconfigure(h2d_bytes_per_s=None)
    shown(header)
    assert find(header, "emulated link").value == math.inf


def test_a_stale_snapshot_does_not_move_a_slider_that_has_just_been_moved(header: HeaderPanel) -> None:
    session, slider = header.session, find(header, "micro-batches")
    old = session.snapshot()
    slider.value = 4
    header.show(old)
    assert slider.value == 4
    later = session.snapshot()
    slider.value = 8
    header.show(later)  # has 4, which the panel has not shown yet
    assert slider.value == 8
    session.wait(HANG_S)
    shown(header)
    assert slider.value == session.relay.config.micro_batches == 8
    assert [change.what for change in session.snapshot().changes] == ["micro_batches 2 → 8"]


def test_a_press_while_the_panel_is_drawn_is_not_lost(header: HeaderPanel) -> None:
    session = header.session
    drawing, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        drawing.set()
        assert go_on.wait(HANG_S)

    find(header, "layers ahead").observe(wait, "value")
    session.reconfigure(ahead=3)
    thread = threading.Thread(target=shown, args=(header,))
    thread.start()
    assert drawing.wait(HANG_S)  # in the middle of moving that slider
    find(header, "Step").click()
    find(header, "micro-batches").value = 4
    go_on.set()
    thread.join(HANG_S)
    now = session.wait(HANG_S)
    assert now.step == 1 and now.config.micro_batches == 4


def test_the_link_is_set_in_both_directions(header: HeaderPanel) -> None:
    link = find(header, "emulated link")
    assert link.value == math.inf
    link.value = 1e8
    header.session.wait(HANG_S)
    figures = header.session.relay.device.figures()
    assert figures["h2d_bytes_per_s"] == figures["d2h_bytes_per_s"] == 1e8
    link.value = math.inf
    header.session.wait(HANG_S)
    assert header.session.relay.device.figures()["h2d_bytes_per_s"] is None


def test_sliders_begin_with_what_is_set() -> None:
    device = EmulatedDevice(h2d_bytes_per_s=7e6)
    with make_relay(RelayConfig(micro_batches=5, ahead=6), device) as relay, Session(relay, make_batches()) as session:
        header = HeaderPanel(session)
        values = [find(header, words).value for words in ("micro-batches", "layers ahead", "emulated link")]
        shown(header)
        assert values == [5, 6, 7e6]
        assert session.snapshot().changes == ()


class Chip(Device):
    """Does what an emulated device does, but is none: its link cannot be set."""

    in_host_memory = True

    def __init__(self) -> None:
        self._inside = EmulatedDevice()
        self.name, self.torch_device, self.ledger = "chip", torch.device("cpu"), self._inside.ledger

    def figures(self) -> dict[str, Any]:
        return {"memory_bytes": None}

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._inside.host_empty(numel, dtype)

    def issue(self, *args: Any, **named: Any) -> Any:
        return self._inside.issue(*args, **named)

    def start(self, *args: Any, **named: Any) -> Any:
        return self._inside.start_timer(*args, **named)

    def close(self) -> None:
        self._inside.close()


def test_a_link_that_is_real_has_no_slider() -> None:
    with make_relay(device=Chip()) as relay, Session(relay, make_batches()) as session:
        header = HeaderPanel(session)
        train(session, 1)
        shown(header)
        assert "chip" in html_of(header) and "could not be drawn" not in html_of(header)
        assert not [one for one in widgets_of(header) if getattr(one, "description", "") == "emulated link"]
