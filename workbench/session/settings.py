"""What can be set between two steps, as one flat mapping: the fields of `RelayConfig`, and the figures of an emulated link."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from l2l_core import EmulatedDevice, Relay, RelayConfig

LINK = ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
SETTINGS = (*(field.name for field in fields(RelayConfig)), *LINK)

Settings = dict[str, Any]  # by name


def settings_of(relay: Relay) -> Settings:
    """Those of a relay and its device as they are."""
    config = relay.config
    return {**{field.name: getattr(config, field.name) for field in fields(config)}, **relay.device.figures()}


def check_settings(settings: Settings) -> None:
    """Refuse what is out of range.

    Raises:
        ValueError: says what would be valid.
    """
    config_of(settings), EmulatedDevice(None, *_link_of(settings))


def apply_settings(relay: Relay, settings: Settings) -> None:
    """Let the next step use them."""
    relay.config = config_of(settings)
    if isinstance(relay.device, EmulatedDevice):
        relay.device.throttle(*_link_of(settings))


def config_of(settings: Settings) -> RelayConfig:
    """The part that is the relay's.

    Raises:
        ValueError: a value, or values together, that it refuses.
    """
    return RelayConfig(**{field.name: settings[field.name] for field in fields(RelayConfig)})


def _link_of(settings: Settings) -> list[Any]:
    return [settings.get(name, 0.0 if name == "latency_s" else None) for name in LINK]
