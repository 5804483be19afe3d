"""Loggers to W&B, trackio and MLflow, with the real packages, offline."""

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S
from sessions import make_batches, make_relay
from sessions import train as run

from l2l_core import Drop
from workbench import Session
from workbench.session.experiment_loggers import MLflow, Trackio, Wandb


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def train(logger: Any) -> list[float]:
    """Two steps, a layer dropped between them; returns the losses."""
    with make_relay() as relay, Session(relay, make_batches(), loggers=[logger]) as session:
        run(session, 1)
        session.edit(Drop(0))
        run(session, 1)
        now = session.wait(HANG_S)
        return [row.loss for row in now.steps]


@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = Wandb(project="depth", dir=str(tmp_path))
    losses = train(logger)
    history = wandb_history(next(tmp_path.rglob("*.wandb")))
    rows = {name: [row[name] for row in history if name in row] for name in {key for row in history for key in row}}
    depth = dict(logger.run.config)["depth"]
    assert rows["loss"] == losses and rows["layers"] == [depth, depth - 1]
    assert len(rows["change"]) == 1 and {"lr", "step/seconds", "bytes/peak_device", "probe/loss"} <= rows.keys()


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The logged rows in the file of an offline run: a header of 7 bytes, then records of LevelDB's log, less than a block."""
    from wandb.proto import wandb_internal_pb2

    data, at, found = path.read_bytes(), 7, []
    assert len(data) < 32_768
    while at < len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if items := record.history.item:
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    logger = Trackio(project="depth", name="run")
    losses = train(logger)
    assert len(losses) == 2 and list(tmp_path.rglob("*.db"))


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the skinny package has no database
    uri = f"file:{tmp_path}"
    logger = MLflow(tracking_uri=uri)
    losses = train(logger)
    client = MlflowClient(uri)
    run = client.get_run(logger.run_id)
    history = client.get_metric_history(logger.run_id, "loss")
    assert [(each.step, each.value) for each in history] == list(enumerate(losses, 1))
    depths = [each.value for each in client.get_metric_history(logger.run_id, "layers")]
    assert depths[0] - 1 == depths[1] and run.data.params["depth"] == str(int(depths[0]))
    assert run.info.status == "FINISHED" and {"lr", "probe/loss", "bytes/peak_device"} <= run.data.metrics.keys()
    text = client.download_artifacts(logger.run_id, "changes.txt", str(tmp_path))
    assert Path(text).read_text().startswith("step 1: ")


@pytest.mark.parametrize("kind", [Wandb, Trackio, MLflow])
def test_a_missing_package_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "package", "no_such_package_of_experiments")
    with pytest.raises(ModuleNotFoundError, match=f"{kind.__name__} needs a package.*pip install no_such"):
        kind()


def test_settings_are_plain(tmp_path: Path) -> None:
    """They can be written as JSON."""

    class Keeps(MLflow):
        def __init__(self) -> None:
            self.settings: dict[str, Any] = {}

        def _log(self, values: Any, step: int) -> None: ...

        def _log_text(self, text: str, step: int) -> None: ...

        def _log_settings(self, settings: Any) -> None:
            self.settings |= settings

        def close(self) -> None: ...

    logger = Keeps()
    train(logger)
    assert json.loads(json.dumps(logger.settings))["depth"] > 1
