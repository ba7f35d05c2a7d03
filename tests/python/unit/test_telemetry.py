# SPDX-License-Identifier: Apache-2.0
"""Telemetry: who decides, what may be said of a model, and that the pages have it all."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.plans.plan import Plan
from memscale.techniques.step_table import STEP_TECHNIQUES
from memscale.telemetry.address import address_of
from memscale.telemetry.consent import choice_file, decide, destination, keep, kept
from memscale.telemetry.families import FAMILIES
from memscale.telemetry.payload import FIELDS, Field, Said, payload, said_of

ROOT = Path(__file__).resolve().parents[3]
VARIABLES = ("DO_NOT_TRACK", "MEMSCALE_TELEMETRY", "MEMSCALE_TELEMETRY_URL", "CI", "CODEBUILD_BUILD_ID",
             "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD")  # fmt: skip
URL = "http://memscale.test:8080/api/v1/telemetry"


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def file() -> Path:
    path = choice_file()
    assert path is not None
    path.parent.mkdir(exist_ok=True)
    return path


# ---- who decides -------------------------------------------------------------------------------------


def expected(track: str | None, switch: str | None, ci: str | None, choice: str) -> tuple[bool, str]:
    """The first that says something."""
    if track == "1":
        return False, "DO_NOT_TRACK"
    if switch:
        return switch == "1", "MEMSCALE_TELEMETRY"
    if choice in ("disable", "damaged"):
        return False, "file"
    if choice == "enable":
        return (False, "CI") if ci == "true" else (True, "file")
    return False, "default"


@pytest.mark.parametrize("choice", ["none", "enable", "disable", "damaged"])
@pytest.mark.parametrize("track", [None, "", "0", "1"])
def test_the_first_that_says_something_decides(
    track: str | None, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice == "damaged":
        file().write_text("{")
    elif choice != "none":
        keep(choice == "enable", URL)
    for switch, ci in itertools.product((None, "", "0", "1", "perhaps"), (None, "false", "true")):
        with monkeypatch.context() as patch:
            for name, value in (("DO_NOT_TRACK", track), ("MEMSCALE_TELEMETRY", switch), ("CI", ci)):
                if value is not None:
                    patch.setenv(name, value)
            decision = decide()
        assert (decision.enabled, decision.decided_by) == expected(track, switch, ci, choice), (switch, ci)
        assert decision.reason


@pytest.mark.parametrize("variable", VARIABLES[3:])
def test_every_kind_of_ci_keeps_a_choice_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(True, URL)
    monkeypatch.setenv(variable, "https://ci.example.org/")
    assert (decide().enabled, decide().decided_by) == (False, "CI")
    monkeypatch.setenv("MEMSCALE_TELEMETRY", "on")
    assert decide().enabled


@pytest.fixture
def readable_by_all() -> Iterator[None]:
    """What is made is everybody's, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_choice_is_read_as_it_was_written_by_its_user_alone(readable_by_all: None) -> None:
    for enabled, url in itertools.product((True, False), (URL, None)):
        keep(enabled, url)
        found = kept()
        assert (found.enabled, found.url, found.problem) == (enabled, url, "")
    assert stat.S_IMODE(file().stat().st_mode) == 0o600
    assert [path.name for path in file().parent.iterdir()] == ["telemetry.json"]


DAMAGED = {
    "empty": "",
    "no JSON": "yes",
    "bytes": "\xff\xfe",
    "a list": "[true]",
    "deep": "[" * 4000,
    "long": json.dumps({"version": 1, "enabled": True, "url": None, "more": "x" * 5000}),
    "another version": json.dumps({"version": 2, "enabled": True, "url": URL}),
    "a word": json.dumps({"version": 1, "enabled": "true", "url": URL}),
    "a number": json.dumps({"version": 1, "enabled": 1, "url": URL}),
    "more": json.dumps({"version": 1, "enabled": True, "url": URL, "id": 7}),
    "less": json.dumps({"version": 1, "enabled": True}),
    "another address": json.dumps({"version": 1, "enabled": True, "url": "file:///etc/passwd"}),
    "no address": json.dumps({"version": 1, "enabled": True, "url": 7}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_off(text: str) -> None:
    file().write_text(text, encoding="latin-1")
    decision = decide()
    assert (decision.enabled, decision.decided_by) == (False, "file")
    assert "is damaged" in decision.reason and str(file()) in decision.reason
    keep(True, URL)
    assert decide().enabled


@pytest.mark.parametrize("kind", ["folder", "pipe", "circle"])
def test_a_file_that_cannot_be_read_is_off(kind: str) -> None:
    if kind == "folder":
        file().mkdir()
    elif kind == "pipe":
        os.mkfifo(file())  # which nobody writes to: reading it would take forever
    else:
        file().symlink_to(file())
    decision = decide()
    assert (decision.enabled, decision.decided_by) == (False, "file")
    assert "cannot be read" in decision.reason


def test_a_relative_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert choice_file() == tmp_path / "home" / ".config" / "memscale" / "telemetry.json"
    assert not decide().enabled
    keep(True, None)
    assert decide().enabled


def test_it_goes_where_the_environment_says_then_where_the_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert destination()[0] is None
    assert "MEMSCALE_TELEMETRY_URL" in destination()[1]
    keep(True, URL)
    address, problem = destination()
    assert address is not None and (address.url, problem) == (URL, "")
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", "https://other.test/in")
    address, problem = destination()
    assert address is not None and (address.url, problem) == ("https://other.test/in", "")
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", "other.test")  # explicit: the file's is not what is wanted
    address, problem = destination()
    assert address is None and "'other.test' is no address" in problem


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost", "http://localhost/api/v1/telemetry"),
        ("https://a.test/", "https://a.test/api/v1/telemetry"),
        ("HTTPS://A.test:443/team/in", "https://a.test/team/in"),
        ("http://10.0.0.1:8080", "http://10.0.0.1:8080/api/v1/telemetry"),
        ("http://[::1]:8080/x", "http://[::1]:8080/x"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    address = address_of(text)
    assert address.url == url
    assert address_of(url) == address


@pytest.mark.parametrize(
    "text",
    ["", "localhost:80", "http://", "http://:80", "ftp://a.test", "file:///x", "http://me:word@a.test",
     "http://a.test:0", "http://a.test:99999", "http://a.test/?who=me", "http://a.test/#me",
     "http://a.test/a b", "http://a.test/\r\nX: y", "http://ä.test", "http://[::1",
     f"http://a.test/{'x' * 600}",
     "http://a.test\\@b.test"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no address for telemetry"):
        address_of(text)


# ---- what is said ------------------------------------------------------------------------------------

HOSTILE = "Acme_secret</script>\n/home/jo/project"


def hostile(base: type[nn.Module], module: str = "acme.models.secret") -> Any:
    return type(HOSTILE, (base,), {"__module__": module})


def from_transformers(name: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name.replace('Model', '')}Config")(**sizes)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name)(config)
    return model


def with_adapters() -> nn.Module:
    import peft

    inner = from_transformers("GPT2Model", n_layer=1, n_embd=32, n_head=2, vocab_size=50)
    model: nn.Module = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    return model


def subclass() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    with torch.device("meta"):
        model: nn.Module = hostile(GPT2Model)(GPT2Config(n_layer=1))
    return model


def holder() -> nn.Module:
    return hostile(nn.Sequential)(nn.Linear(2, 2), from_transformers("ResNetModel"))


MODELS: dict[str, tuple[Any, str]] = {
    "a linear": (lambda: nn.Linear(3, 3), "other"),
    "hostile": (lambda: hostile(nn.Linear)(3, 3), "other"),
    "nearly": (lambda: hostile(nn.Linear, "transformers.models.gpt2_acme.modeling_gpt2")(3, 3), "other"),
    "its name": (lambda: type("GPT2Model", (nn.Linear,), {"__module__": "__main__"})(3, 3), "other"),
    "no text": (lambda: hostile(nn.Linear, 7)(3, 3), "other"),  # type: ignore[arg-type]
    "gpt2": (lambda: from_transformers("GPT2Model", n_layer=1), "gpt2"),
    "bert": (lambda: from_transformers("BertModel", num_hidden_layers=1), "bert"),
    "llama": (lambda: from_transformers("LlamaModel", num_hidden_layers=1), "llama"),
    "t5": (lambda: from_transformers("T5Model", num_layers=1), "t5"),
    "vit": (lambda: from_transformers("ViTModel", num_hidden_layers=1), "vit"),
    "gemma3": (lambda: from_transformers("Gemma2Model", num_hidden_layers=1), "gemma"),
    "adapters": (with_adapters, "gpt2"),
    "subclass": (subclass, "gpt2"),
    "compiled": (lambda: torch.compile(from_transformers("BertModel", num_hidden_layers=1)), "bert"),
    "a part": (holder, "resnet"),
}


def is_admitted(field: Field, value: Any) -> bool:
    if field.is_list:
        return isinstance(value, list) and value == sorted({*value}) and {*value} <= {*field.values}
    if value in field.values and any(type(value) is type(item) for item in field.values):
        return True
    return bool(field.pattern) and re.fullmatch(field.pattern, value) is not None


def read(text: bytes) -> dict[str, Any]:
    """A payload, which has the table's keys in the table's order, and its values alone."""
    found: dict[str, Any] = json.loads(text)
    assert [*found] == [field.name for field in FIELDS]
    for field in FIELDS:
        assert is_admitted(field, found[field.name]), (field.name, found[field.name])
    assert text.isascii() and b" " not in text and len(text) < 1024
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(3))
    )
    plain = memscale.plan(model, sample_input=torch.randn(512, 64), memory_budget="1GiB").plain
    return memscale.plan(
        model, sample_input=torch.randn(512, 64), memory_budget=int(plain.device_used_peak_bytes * 0.7)
    )


@pytest.mark.parametrize(("make", "family"), MODELS.values(), ids=MODELS)
def test_a_model_is_of_a_known_family_or_another(make: Any, family: str, plan: Plan) -> None:
    text = payload(said_of(make(), plan, "cpu", []))
    found = read(text)
    assert found["architecture"] == family
    assert "checkpoint" in found["techniques"]
    for word in (b"cme", b"secret", b"script", b"home"):
        assert word not in text


@pytest.mark.parametrize(
    ("count", "bucket"),
    [(0, "<1M"), (10**6 - 1, "<1M"), (10**6, "1M-10M"), (10**7, "10M-100M"), (10**9 - 1, "100M-1B"),
     (10**9, "1B-10B"), (10**11 - 1, "10B-100B"), (10**11, "100B+"), (10**15, "100B+")],
)  # fmt: skip
def test_parameters_come_in_buckets(count: int, bucket: str) -> None:
    assert read(payload(Said(parameters=count)))["parameters"] == bucket


def test_what_is_not_in_the_table_does_not_leave() -> None:
    found = read(payload(Said(HOSTILE, -1, (HOSTILE, "offload", "offload"), HOSTILE, True)))
    assert (found["architecture"], found["techniques"], found["device"]) == ("other", ["offload"], "other")
    for field in FIELDS:
        if not field.is_list and field.name not in ("schema", "event", "fits", "parameters"):
            assert field.admitted(HOSTILE) == "other"
            assert field.admitted(f"2.1\n{HOSTILE}") == "other"


def test_versions_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0a0+gitdeadbeef")
    assert read(payload(Said()))["torch"] == "2.14"
    monkeypatch.setattr(torch, "__version__", "acme-build")
    assert read(payload(Said()))["torch"] == "other"
    assert read(payload(Said()))["memscale"] == ".".join(memscale.__version__.split(".")[:3])


def test_every_technique_is_in_the_table() -> None:
    (techniques,) = (field for field in FIELDS if field.name == "techniques")
    names = {technique.name for technique in STEP_TECHNIQUES}
    assert names | {"checkpoint", "selective", "offload"} <= {*techniques.values}


def test_eight_bit_state_is_named(plan: Plan) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    assert "eight_bit_state" not in said_of(model, plan, "cpu", [optimizer]).techniques
    memscale.wrap(model, sample_input=torch.randn(4, 64), optimizer=optimizer, use_8bit_optimizer=True)
    assert "eight_bit_state" in said_of(model, plan, "cpu", [optimizer]).techniques
    memscale.detach(model)


# ---- the pages ---------------------------------------------------------------------------------------


def shown(field: Field) -> set[str]:
    return {value if isinstance(value, str) else json.dumps(value) for value in field.values}


def test_the_guide_has_the_table() -> None:
    page = (ROOT / "docs" / "guide" / "telemetry.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    table = [row for row in rows if len(row) == 3]
    assert [row[0].strip("`") for row in table] == [field.name for field in FIELDS]
    for field, (_, what, values) in zip(FIELDS, table, strict=True):
        assert what == field.what
        named = {*re.findall(r"`([^`]+)`", values)}
        examples = {
            value for value in named - shown(field) if field.pattern and re.fullmatch(field.pattern, value)
        }
        assert named - examples == shown(field), field.name
        assert len(examples) == bool(field.pattern)
    read(re.findall(r"^```json\n(.*?)\n```", page, re.MULTILINE | re.DOTALL)[0].encode())


def schema() -> dict[str, Any]:
    """The table as JSON Schema."""
    properties: dict[str, Any] = {}
    for field in FIELDS:
        one: dict[str, Any] = {"enum": [*field.values]}
        if field.pattern:
            others = "|".join(map(str, field.values))
            one = {"type": "string", "pattern": f"^(?:{field.pattern}|{others})$"}
        properties[field.name] = (
            {"type": "array", "items": one, "uniqueItems": True} if field.is_list else one
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in FIELDS],
        "properties": properties,
    }


def test_the_design_has_the_schema() -> None:
    page = (ROOT / "docs" / "design" / "telemetry.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert json.loads(text) == schema()
    assert {*schema()["properties"]["architecture"]["enum"]} == {*FAMILIES}
