"""What can be set between two steps, as one flat mapping: the fields of `RelayConfig`, and the figures of an emulated link.

`Plan` knows what is set, what will be, and what was at the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from l2l_core import Device, EmulatedDevice, Relay, RelayConfig
from workbench.session.snapshot_values import Change

LINK_SETTINGS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
SETTINGS = (*(field.name for field in fields(RelayConfig)), *LINK_SETTINGS)

Settings = dict[str, Any]  # by name


def read_settings(relay: Relay) -> Settings:
    """Read the settings of a relay and its device as they are."""
    config = relay.config
    return {**{field.name: getattr(config, field.name) for field in fields(config)}, **relay.device.figures()}


def check_names(names: Iterable[str], device: Device) -> None:
    """Refuse what is no setting, or none of this device.

    Raises:
        ValueError: says what can be set.
    """
    for name in names:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        if name in LINK_SETTINGS and not isinstance(device, EmulatedDevice):
            raise ValueError(f"{name}: the link of {device.name} is real; only an emulated one can be set")


def check_settings(settings: Settings) -> None:
    """Refuse what is out of range.

    Raises:
        ValueError: says what would be valid.
    """
    make_config(settings), EmulatedDevice(None, *_link_arguments(settings))  # made for what their constructors refuse


def apply_settings(relay: Relay, settings: Settings) -> None:
    """Let the next step use them."""
    relay.config = make_config(settings)
    if isinstance(relay.device, EmulatedDevice):
        relay.device.throttle(*_link_arguments(settings))


def make_config(settings: Settings) -> RelayConfig:
    """Make the configuration of the relay from its part of the settings.

    Raises:
        ValueError: a value, or values together, that it refuses.
    """
    return RelayConfig(**{field.name: settings[field.name] for field in fields(RelayConfig)})


def _link_arguments(settings: Settings) -> list[Any]:
    return [settings.get(name, 0.0 if name == "latency_s" else None) for name in LINK_SETTINGS]


class SettingsPlan:
    """What settings will be, and what they were when they were last used.

    Invariant: `settings` is read and written under the session's lock, the rest by its thread alone.

    Attributes:
        settings: as they will be once everything queued is done.
        used: those of the last step.
        noted: on record as set since then; settings between two steps are one change, however often they are set.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.settings = self.last_used = read_settings(relay)
        self.recorded: Change | None = None

    def mark_used(self) -> None:
        """Note that a step used the relay's settings, or that it became another relay: changes count from here on."""
        self.last_used, self.recorded = read_settings(self._relay), None

    def apply_queued(self, queued: Iterable[Mapping[str, Any]]) -> None:
        """Read the relay's settings anew, and put those on top that still wait in the queue, in order."""
        self.settings = read_settings(self._relay)
        for more in queued:
            with suppress(ValueError):  # no longer fits: its turn will tell
                check_settings(planned := {**self.settings, **more})
                self.settings = planned
