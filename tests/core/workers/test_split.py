"""Several workers cut their batches by ``split=`` as one cuts its own, and train on the parts of all, to the bit."""

import pytest
from crew import Crew
from crew_split import train_cut


@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["views", "dims", "function", "sequences"])
def test_two_workers_cut_alike(name: str, two: Crew) -> None:
    for seen in two.run(train_cut, name):
        assert seen["losses"] == pytest.approx(seen["expected"], rel=1e-6), seen
        assert not seen["differences"] and seen["verified"], seen
