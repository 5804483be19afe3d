from collections.abc import Callable
from typing import Any

import pytest
from zoo import BY_NAME

from l2l_core.strategies import Lab


@pytest.fixture
def lab_of() -> Callable[..., Lab]:
    def make(name: str, rows: int = 7, **settings: Any) -> Lab:
        kind = BY_NAME[name]
        return Lab(
            kind.make_model(),
            kind.make_batch(rows, 0),
            loss=kind.loss,
            loss_over=kind.loss_over,
            layers=kind.layers,
            **settings,
        )

    return make
