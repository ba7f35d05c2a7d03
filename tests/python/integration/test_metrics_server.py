# SPDX-License-Identifier: Apache-2.0
"""`Config(observability_port=...)`: a server that tells the truth, and never gets in the way of training."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.core import plan_log
from memscale.errors import MemScaleError
from memscale.observability import metrics

pytest.importorskip("prometheus_client")


class Tower(nn.Sequential):
    pass


def model() -> Tower:
    return Tower(nn.Linear(8, 8), nn.Tanh())


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(port: int | None) -> Config:
    return Config(memory_budget="1GiB", observability_port=port, enable_logging=False)


def scrape(port: int) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: bytes = answer.read()
    return text.decode()


def value_of(sample: str, text: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{sample} ")]
    return float(line.rpartition(" ")[2])


def models_in(text: str) -> set[str]:
    return set(re.findall(r'model="([^"]*)"', text))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server that follows would
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    yield number
    gc.collect()
    assert is_free(number), "a server outlived its test"


def test_a_scrape_tells_the_plan(port: int) -> None:
    wrapped = model()
    memscale.wrap(wrapped, config(port), sample_input=batch())
    text = scrape(port)
    plan = memscale.plan(wrapped, config=config(None), sample_input=batch())
    labels = f'model="Tower",plan="{plan.digest}",version="{memscale.__version__}"'
    assert value_of(f"memscale_plan_info{{{labels}}}", text) == 1
    assert value_of('memscale_memory_limit_bytes{model="Tower"}', text) == 1 << 30
    peak = plan.predicted.device_used_peak_bytes
    assert value_of('memscale_predicted_peak_bytes{model="Tower"}', text) == peak
    assert text == metrics.render(wrapped)
    memscale.detach(wrapped)


def test_what_is_not_known_is_not_there(port: int) -> None:
    wrapped = model()
    memscale.wrap(wrapped, config(port))
    names = set(re.findall(r"^(memscale\w+)\{", scrape(port), re.MULTILINE))
    assert names == {"memscale_planning_seconds_total"}  # no plan, no engine, no card
    wrapped(batch()).sum().backward()
    names = set(re.findall(r"^(memscale\w+)\{", scrape(port), re.MULTILINE))
    assert "memscale_predicted_peak_bytes" in names
    assert not {name for name in names if "offload" in name or "allocated" in name or "fragment" in name}
    memscale.detach(wrapped)


def test_models_share_a_port_and_have_names(port: int) -> None:
    first, second, third = model(), model(), nn.Linear(8, 8)
    for wrapped in (first, second, third):
        memscale.wrap(wrapped, config(port), sample_input=batch())
    assert models_in(scrape(port)) == {"Tower", "Tower-2", "Linear"}
    assert models_in(metrics.render(second)) == {"Tower-2"}
    memscale.detach(first)
    assert models_in(scrape(port)) == {"Tower-2", "Linear"}
    memscale.wrap(first, config(port), sample_input=batch())
    assert models_in(scrape(port)) == {"Tower", "Tower-2", "Linear"}
    for wrapped in (first, second, third):
        memscale.detach(wrapped)


def test_the_last_model_frees_the_port_and_another_may_take_it(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with memscale.optimize(model(), config=config(port), sample_input=batch()):
            assert models_in(scrape(port)) == {"Tower"}
        assert is_free(port)
    assert not caplog.records


def test_wrapping_again_moves_to_another_port(port: int) -> None:
    wrapped, other = model(), free_port()
    memscale.wrap(wrapped, config(port), sample_input=batch())
    memscale.wrap(wrapped, config(other), sample_input=batch())
    assert is_free(port) and models_in(scrape(other)) == {"Tower"}
    memscale.wrap(wrapped, config(None), sample_input=batch())
    assert is_free(other)
    memscale.detach(wrapped)


def test_a_wrap_that_fails_leaves_no_server(port: int) -> None:
    with pytest.raises(RuntimeError):
        memscale.wrap(model(), config(port), sample_input=torch.randn(4, 9))


def test_a_second_wrap_that_fails_leaves_the_first_one_shown(port: int) -> None:
    wrapped = model()
    memscale.wrap(wrapped, config(port), sample_input=batch())
    with pytest.raises(RuntimeError):
        memscale.wrap(wrapped, config(port), sample_input=torch.randn(4, 9))
    assert models_in(scrape(port)) == {"Tower"}
    memscale.detach(wrapped)


def test_a_model_that_is_gone_is_not_shown(port: int) -> None:
    kept, lost = model(), nn.Linear(8, 8)
    for wrapped in (kept, lost):
        memscale.wrap(wrapped, config(port), sample_input=batch())
    del wrapped, lost
    gc.collect()
    assert models_in(scrape(port)) == {"Tower"}
    memscale.detach(kept)


def test_a_busy_port_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = model()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        memscale.wrap(wrapped, config(port), sample_input=batch())
        for _ in range(2):
            wrapped(batch()).sum().backward()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"no metrics on 127.0.0.1:{port}, training goes on without: ")
    memscale.detach(wrapped)
    assert len(caplog.records) == 1


def test_without_the_package_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    wrapped = model()
    memscale.wrap(wrapped, config(None), sample_input=batch())
    assert not caplog.records  # nothing asked for, nothing imported
    memscale.wrap(wrapped, config(free_port()), sample_input=batch())
    wrapped(batch()).sum().backward()
    (record,) = caplog.records
    assert "pip install 'memscale[metrics]'" in record.getMessage() and record.levelno == logging.WARNING
    with pytest.raises(MemScaleError, match=re.escape("pip install 'memscale[metrics]'")):
        metrics.render(wrapped)
    memscale.detach(wrapped)


def test_the_port_is_no_field_without_effect() -> None:
    assert plan_log.fields_without_effect(config(9400)) == []


def test_a_model_that_is_not_wrapped_has_no_metrics() -> None:
    with pytest.raises(ValueError, match="not wrapped"):
        metrics.render(model())


def test_a_forked_child_lets_go_of_the_port(port: int) -> None:
    wrapped = model()
    memscale.wrap(wrapped, config(port), sample_input=batch())
    asks, told = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        os.write(told[1], b"y" if not metrics._state.ports else b"n")
        os.read(asks[0], 1)
        os._exit(0)
    try:
        assert os.read(told[0], 1) == b"y"
        assert models_in(scrape(port)) == {"Tower"}
        memscale.detach(wrapped)
        assert is_free(port)  # while the child is alive
    finally:
        os.write(asks[1], b"x")
        os.waitpid(child, 0)
        for end in (*asks, *told):
            os.close(end)


def test_importing_memscale_imports_none_of_it() -> None:
    program = (
        "import sys, memscale\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'prometheus_client', 'http', 'jinja2', 'torch', 'wsgiref'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
