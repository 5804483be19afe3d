"""Relays inside training frameworks: transformers' Trainer and Lightning. Each file imports its framework; this one imports none.

`pretrained.py` loads models of transformers for `Relay.from_pretrained`.

May import `relay`, `shelf`, `step`, `batches`, `config`, `devices`, `trace`.
Begin reading at `transformers_trainer.py` or `lightning.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from l2l_core.integrations.lightning import RelayStrategy as RelayStrategy
    from l2l_core.integrations.pretrained import load_pretrained as load_pretrained
    from l2l_core.integrations.transformers_trainer import RelayTrainer as RelayTrainer

_LATE = {
    "RelayStrategy": "l2l_core.integrations.lightning",
    "RelayTrainer": "l2l_core.integrations.transformers_trainer",
    "load_pretrained": "l2l_core.integrations.pretrained",
}


def __getattr__(name: str) -> Any:
    """Import a name in `_LATE`, with its framework, on first use (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module 'l2l_core.integrations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
