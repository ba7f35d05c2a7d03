# SPDX-License-Identifier: Apache-2.0
"""What test_mlflow.py has an unchanged MLflow client do: run by the Python that has mlflow. Prints JSON."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from requests import HTTPError


def refusal(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except MlflowException as error:
        return [error.error_code, error.message]
    except HTTPError as error:  # of artifacts
        return ["", str(error)]
    return ["", "nothing was refused"]


def logged_run() -> dict[str, Any]:
    """A run by the fluent API, as a training script has it."""
    mlflow.set_experiment("vision")
    with mlflow.start_run(run_name="first", tags={"team": "a"}) as run:
        mlflow.log_params({"lr": 0.1, "layers": 4})
        mlflow.log_param("note", "é <b>")
        for step in range(5):
            mlflow.log_metric("loss", 2.0 / (step + 1), step=step)
        mlflow.log_metrics({"a/b": 1.5, "nan": math.nan, "inf": -math.inf}, step=3)
        mlflow.set_tag("stage", "one")
        mlflow.set_tag("stage", "two")
        mlflow.set_tags({"x": "1", "y": "2"})
        mlflow.delete_tag("y")
        refused = {
            "artifact": refusal(lambda: mlflow.log_text("hello", "a.txt")),
            "param": refusal(lambda: mlflow.log_param("lr", 0.2)),
        }
    client = MlflowClient()
    got = client.get_run(run.info.run_id)
    return {
        "id": run.info.run_id,
        "name": got.info.run_name,
        "status": got.info.status,
        "lasts": got.info.end_time >= got.info.start_time > 1e12,
        "experiment": client.get_experiment(got.info.experiment_id).name,
        "params": got.data.params,
        "tags": {key: value for key, value in got.data.tags.items() if not key.startswith("mlflow.")},
        "system": sorted(key for key in got.data.tags if key.startswith("mlflow.")),
        "metrics": {key: repr(value) for key, value in got.data.metrics.items()},
        "history": [
            [point.step, point.value] for point in client.get_metric_history(got.info.run_id, "loss")
        ],
        "refused": refused,
    }


def batches() -> dict[str, Any]:
    """The client's batches, at their limits, from several threads, and more history than one page has."""
    client = MlflowClient()
    experiment = client.create_experiment("batches")
    run = client.create_run(experiment, start_time=1_700_000_000_000)
    id_ = run.info.run_id
    points = [Metric("m", step / 7, 1_700_000_000_000 + step, step) for step in range(26_000)]
    for begin in range(0, len(points), 1000):
        client.log_batch(id_, metrics=points[begin : begin + 1000])
    client.log_batch(id_, metrics=points[:1000])  # again, as after an answer that was lost
    mixed = [Metric(f"k{index % 7}", index, 1_700_000_000_000, index) for index in range(100)]
    params, tags = [Param(f"p{i}", str(i)) for i in range(100)], [RunTag(f"t{i}", str(i)) for i in range(100)]
    client.log_batch(id_, metrics=mixed, params=params, tags=tags)

    def work(number: int) -> None:
        for step in range(10):
            client.set_tag(id_, f"thread{number}-{step}", "x")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.set_terminated(id_, "KILLED", 1_700_000_100_000)
    got = client.get_run(id_)
    history = client.get_metric_history(id_, "m")
    return {
        "same": [(p.step, p.value, p.timestamp) for p in history]
        == [(p.step, p.value, p.timestamp) for p in points],
        "params": len(got.data.params),
        "tags": len([key for key in got.data.tags if not key.startswith("mlflow.")]),
        "k3": [point.value for point in client.get_metric_history(id_, "k3")],
        "nothing": client.get_metric_history(id_, "none"),
        "status": got.info.status,
        "times": [got.info.start_time, got.info.end_time],
    }


def searches() -> dict[str, Any]:
    client = MlflowClient()
    experiment = client.create_experiment("many")
    ids = []
    for index in range(12):
        run = client.create_run(experiment, run_name=f"r{index}", start_time=1_700_000_000_000 + index)
        client.log_metric(run.info.run_id, "loss", (index * 7) % 12, timestamp=1, step=0)
        client.log_param(run.info.run_id, "lr", str(index % 3))
        client.set_tag(run.info.run_id, "a tag", "even" if index % 2 == 0 else "odd")
        ids.append(run.info.run_id)
        if index % 4 == 0:
            client.set_terminated(run.info.run_id)

    def names(filter_: str = "", order: list[str] | None = None, **more: Any) -> list[str]:
        return [
            run.info.run_name for run in client.search_runs([experiment], filter_, order_by=order, **more)
        ]

    client.delete_run(ids[0])
    pages, token = [], None
    while True:
        page = client.search_runs([experiment], max_results=5, page_token=token)
        pages.append(len(page))
        token = page.token
        if not token:
            break
    found = {
        "all": names(),
        "pages": pages,
        "loss": names("metrics.loss < 4", ["metrics.loss ASC"]),
        "lr": names("params.lr = '2' and metrics.loss >= 2", ["metrics.loss DESC"]),
        "tag": names("tags.`a tag` = 'odd' AND attributes.run_name LIKE 'r1%'", ["attributes.start_time"]),
        "done": names("attributes.status = 'FINISHED'"),
        "deleted": names(run_view_type=ViewType.DELETED_ONLY),
        "wrong": refusal(lambda: names("metrics.loss LIKE 'x'")),
        "experiments": sorted(item.name for item in client.search_experiments()),
        "named": [item.name for item in client.search_experiments(filter_string="name = 'many'")],
    }
    client.restore_run(ids[0])
    return found | {"restored": len(names())}


def refusals() -> dict[str, Any]:
    client = MlflowClient()
    return {
        "run": refusal(lambda: client.get_run("0" * 32)),
        "experiment": refusal(lambda: client.get_experiment("987654")),
        "again": refusal(lambda: client.create_experiment("vision")),
        "location": refusal(
            lambda: client.create_experiment("far", artifact_location="http://example.org/x")
        ),
        "model": refusal(lambda: client.create_registered_model("m")),
        "by_name": client.get_experiment_by_name("none"),
    }


def resumed() -> dict[str, Any]:
    """A finished run that goes on, in the default experiment."""
    with mlflow.start_run(experiment_id="0") as run:
        mlflow.log_metric("loss", 1.0, step=0)
    with mlflow.start_run(run_id=run.info.run_id):
        status = MlflowClient().get_run(run.info.run_id).info.status
        mlflow.log_metric("loss", 0.5, step=1)
    got = MlflowClient().get_run(run.info.run_id)
    experiment = MlflowClient().get_experiment(got.info.experiment_id).name
    return {"between": status, "after": got.info.status, "experiment": experiment,
            "loss": got.data.metrics["loss"]}  # fmt: skip


PARTS = {"run": logged_run, "batches": batches, "searches": searches, "refusals": refusals,
         "resumed": resumed, "denied": lambda: refusal(lambda: mlflow.set_experiment("x"))}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps({name: PARTS[name]() for name in sys.argv[1:]}))
