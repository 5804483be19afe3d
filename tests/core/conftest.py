"""Two workers for many tests: a process that imports PyTorch takes seconds to start."""

from collections.abc import Iterator

import pytest
from crew import Crew


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew
