"""Settings that can change between two steps, as one flat mapping: fields of `RelayConfig`, figures of an emulated link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from l2l_core import Device, EmulatedDevice, Relay, RelayConfig
from workbench.session.snapshot_values import Change

LINK_SETTINGS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
SETTINGS = (*(field.name for field in fields(RelayConfig)), *LINK_SETTINGS)

Settings = dict[str, Any]  # name -> value


def read_settings(relay: Relay) -> Settings:
    """Return the current settings of a relay and its device."""
    config = relay.config
    return {**{field.name: getattr(config, field.name) for field in fields(config)}, **relay.device.figures()}


def plain_settings(settings: Settings) -> Settings:
    """Return settings for a file, with a plan as text and a function by its name; see `RelayConfig.to_plain`."""
    return {**settings, "schedule": make_config(settings).to_plain()["schedule"]}


def read_plain_settings(plain: Settings, known: Settings) -> Settings:
    """Return the settings of `plain_settings`; a function is that of the `known` settings, see `RelayConfig.from_plain`."""
    found = RelayConfig.from_plain({"schedule": plain["schedule"]}, make_config(known))
    return {**plain, "schedule": found.schedule}


def check_names(names: Iterable[str], device: Device) -> None:
    """Check that settings exist and apply to a device.

    Raises:
        ValueError: an unknown name, or a figure of a real link.
    """
    for name in names:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        if name in LINK_SETTINGS and not isinstance(device, EmulatedDevice):
            raise ValueError(
                f"{name}: the link of {device.name} is real and cannot be set; use an EmulatedDevice for that"
            )


def check_settings(settings: Settings) -> None:
    """Check the values of settings.

    Raises:
        ValueError: a value that `RelayConfig` or `EmulatedDevice` refuses.
    """
    make_config(settings)
    EmulatedDevice(None, *_link_arguments(settings))


def apply_settings(relay: Relay, settings: Settings) -> None:
    """Apply settings to a relay and its device for the next step."""
    relay.config = make_config(settings)
    if isinstance(relay.device, EmulatedDevice):
        relay.device.throttle(*_link_arguments(settings))


def make_config(settings: Settings) -> RelayConfig:
    """Make a relay configuration from its part of the settings.

    Raises:
        ValueError: a value, or a combination of values, that `RelayConfig` refuses.
    """
    return RelayConfig(**{field.name: settings[field.name] for field in fields(RelayConfig)})


def _link_arguments(settings: Settings) -> list[Any]:
    return [settings.get(name, 0.0 if name == "latency_s" else None) for name in LINK_SETTINGS]


class SettingsPlan:
    """Settings after the queue has run, and settings of the last step.

    Invariant: `settings` is read and written under the session's lock, the rest by its thread alone.

    Attributes:
        start: settings when the session began.
        settings: settings after all queued commands.
        last_used: settings of the last step.
        recorded: the recorded change since then; all new settings between two steps form one change.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.start = self.settings = self.last_used = read_settings(relay)
        self.recorded: Change | None = None

    @property
    def changed_from(self) -> Settings:
        """Settings that differ from those at the start, with the values that they had."""
        return {name: was for name, was in self.start.items() if name in SETTINGS and self.settings[name] != was}

    def mark_used(self) -> None:
        """Make the current settings the reference for the next change, after a step or a switch of branches."""
        self.last_used, self.recorded = read_settings(self._relay), None

    def apply_queued(self, queued: Iterable[Mapping[str, Any]]) -> None:
        """Read the relay's settings again, and add those that wait in the queue, in order."""
        self.settings = read_settings(self._relay)
        for settings in queued:
            with suppress(ValueError):  # no longer valid: its command will fail
                check_settings(planned := {**self.settings, **settings})
                self.settings = planned
