"""A disk without room: the error says so in words and bytes, and nothing is lost. The system itself refuses to write."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small import assert_same, make_batch, make_gpt, make_relay, whole

from l2l_core import Drop, Relay


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file may grow larger than this, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt(3)) as relay:
        relay.step(make_batch())
        yield relay


SAYS = r"bytes are to be written to .*, and [\d,]+ are free there\. Free some"


@pytest.mark.parametrize("nbytes", [0, 1_000, 20_000])
def test_a_full_disk_loses_nothing(nbytes: int, relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    saved = whole(relay)
    relay.step(make_batch(1))
    later = whole(relay)
    with room_for(nbytes), pytest.raises(OSError, match=SAYS) as caught:
        relay.save(tmp_path)
    assert str(tmp_path) in str(caught.value) and caught.value.errno
    assert_same(whole(relay), later)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1  # nothing of the save that failed
    with Relay.load(tmp_path, model := make_gpt(3), relay_optimizer(relay)) as loaded:
        assert_same(whole(loaded), saved | {"random": whole(loaded)["random"]})
        assert model is loaded.model
    assert relay.step(make_batch(2)).loss > 0
    relay.save(tmp_path)


def relay_optimizer(relay: Relay) -> Callable[..., object]:
    return lambda params: type(relay.optimizer)(params, lr=1e-2)


def test_needed_bytes_are_those_of_the_save(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    with room_for(0), pytest.raises(OSError) as caught:
        relay.save(tmp_path)
    needed = int(str(caught.value).split(" bytes")[0].split()[-1].replace(",", ""))
    assert 0.7 * written < needed <= written  # files have headers besides


def test_a_layer_that_finds_no_room_stays_in_memory(relay: Relay) -> None:
    before = whole(relay)
    with room_for(0), pytest.raises(OSError, match=SAYS):
        relay.apply(Drop(1, park="disk"))
    assert_same(whole(relay), before)
    relay.apply(Drop(1, park="disk"))
    relay.undo()
    assert_same(whole(relay), before)
