# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models by name and file: the built-in table, the batches, the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_samples import Runner
from memscale.cli import hub, known_models
from memscale.cli.problems import UsageError

pytest.importorskip("transformers")

from memscale.cli import hf


@pytest.fixture(autouse=True)
def without_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def tiny(kind: str, **more: Any) -> hub.Found:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return hub.Found(kind, {"model_type": kind, "vocab_size": 99, **sizes, **more})


@pytest.mark.parametrize("name", known_models.names())
def test_the_table_builds_models_with_the_published_number_of_weights(name: str) -> None:
    known = known_models.find(name)
    assert known is not None
    built = hf.build(hub.Found(name, dict(known.values)), None, torch.float32)
    assert all(weight.is_meta for weight in built.model.parameters())
    assert sum(weight.numel() for weight in built.model.parameters()) == known.parameters


def test_names_are_found_in_any_case_and_without_owner() -> None:
    assert known_models.find("GPT2-XL") is known_models.find("openai-community/gpt2-xl")
    assert known_models.find("bert-base") is known_models.find("google-bert/bert-base-uncased")
    assert known_models.find("gpt5") is None
    assert "openai-community/gpt2-medium" in known_models.closest("gpt2-medum")


@pytest.mark.parametrize(
    ("found", "task", "inputs"),
    [
        (tiny("gpt2"), "causal-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        (tiny("bert"), "masked-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        (tiny("llama"), "causal-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        (hub.Found("t5", {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}),
         "seq2seq-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        (tiny("vit", image_size=32, patch_size=16), "image-classification",
         {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
        (hub.Found("whisper", dict(known_models.find("whisper-tiny").values)),  # type: ignore[union-attr]
         "speech-seq2seq", {"input_features": (2, 80, 3000), "labels": (2, 8)}),
    ],
)  # fmt: skip
def test_batches_are_what_the_model_takes(
    found: hub.Found, task: str, inputs: dict[str, tuple[int, ...]]
) -> None:
    built = hf.build(found, None, torch.float32)
    batch = built.make(2, 8)
    assert built.task == task
    assert {name: tuple(value.shape) for name, value in batch.items()} == inputs
    real = {name: value if value.is_meta else value.to("meta") for name, value in batch.items()}
    assert built.model(**real).loss.dim() == 0


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_encoders_are_trained_on_pairs(run: Runner, tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    values = {"model_type": kind, "text_config": {**sizes, "vocab_size": 99}, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(values))
    pictures = run("estimate", tmp_path, "--task", "image-classification", "--device", "cpu")
    assert pictures.code == 0, pictures.err
    values["architectures"] = [{"clip": "CLIPModel", "siglip": "SiglipModel"}[kind]]
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = run("estimate", tmp_path, "--batch", 4, "--device", "cpu", "--json")
    assert said.code == 0, said.err
    assert said.document["model"]["origin"].endswith("image-text")
    assert said.document["cases"][0]["sequence"] == {"clip": 77, "siglip": 64}[kind]
    run("estimate", tmp_path, "--seq", 99, "--device", "cpu").refused("--seq 99", "give at most")


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "question-answering"])
def test_heads_by_task(run: Runner, tmp_path: Path, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("bert").values))
    said = run("estimate", tmp_path, "--task", task, "--seq", 16, "--device", "cpu", "--json")
    assert said.code == 0
    assert task in said.document["model"]["origin"]


def test_decoders_classify_too(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("gpt2").values))
    said = run(
        "estimate",
        tmp_path,
        "--task",
        "sequence-classification",
        "--batch",
        2,
        "--seq",
        16,
        "--device",
        "cpu",
    )
    assert said.code == 0, said.err


def test_positions() -> None:
    def limits(kind: str, **more: Any) -> tuple[int | None, int | None]:
        built = hf.build(tiny(kind, **more), None, torch.float32)
        return built.longest, built.trained

    assert limits("bert", max_position_embeddings=64) == (64, None)
    assert limits("roberta", max_position_embeddings=66, pad_token_id=1) == (64, None)
    assert limits("opt", max_position_embeddings=64, word_embed_proj_dim=32, ffn_dim=64) == (64, None)
    assert limits("llama", max_position_embeddings=64) == (None, 64)
    assert limits("llama", max_position_embeddings=99) == (
        None,
        99,
    )  # as many as words: no table of positions


def test_a_sequence_beyond_the_positions(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "bert.json").write_text(json.dumps(tiny("bert", max_position_embeddings=64).values))
    (tmp_path / "llama.json").write_text(json.dumps(tiny("llama", max_position_embeddings=64).values))
    run("estimate", tmp_path / "bert.json", "--seq", 65, "--device", "cpu").refused("--seq 65", "at most 64")
    said = run("estimate", tmp_path / "llama.json", "--seq", 65, "--device", "cpu")
    assert said.code == 0
    assert "beyond the 64 tokens" in said.out


def test_images_have_no_length(run: Runner) -> None:
    run("estimate", "vit-base", "--seq", 8, "--device", "cpu").refused("--seq", "no length")


def test_the_table_says_that_it_was_used(run: Runner) -> None:
    said = run("estimate", "distilgpt2", "--seq", 32, "--device", "cpu")
    assert said.code == 0
    assert said.out.count("built-in table") == 1
    assert "81.91 million weights" in said.out


def test_a_model_of_70_billion_weights_takes_no_memory() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = known_models.find("llama-2-70b")
    assert known is not None
    built = hf.build(hub.Found("70b", dict(known.values)), None, torch.bfloat16)
    assert sum(weight.nbytes for weight in built.model.parameters()) > 10**11
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no model configuration"),
        ("[]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ('{"model_type": "flurbl"}', "does not know model_type 'flurbl'"),
        ('{"model_type": "flurbl"}', "pip install --upgrade transformers"),
        ('{"model_type": "flurbl", "auto_map": {"AutoConfig": "a.B"}}', "trust_remote_code=True"),
        ('{"model_type": "llava"}', "give a function"),
        ('{"model_type": "gpt2", "n_embd": 7, "n_head": 2}', "cannot build GPT2LMHeadModel"),
        ("[" * 100_000, "no model configuration"),
    ],
)
def test_bad_configurations(run: Runner, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    run("estimate", path, "--device", "cpu").refused(message)


def test_unknown_models(run: Runner, tmp_path: Path) -> None:
    run("estimate", "gpt2-medum", "--device", "cpu").refused("gpt2-medum", "openai-community/gpt2-medium")
    run("estimate", tmp_path / "nothing.json", "--device", "cpu").refused("cannot read")
    run("estimate", "net.py", "--device", "cpu").refused("'net.py' is a program", "net.py:build")
    run("estimate", f"{tmp_path}/", "--device", "cpu").refused("cannot read")


def test_a_task_that_the_model_has_not(run: Runner) -> None:
    run("estimate", "gpt2", "--task", "masked-lm", "--device", "cpu").refused("masked-lm", "causal-lm")


def test_the_hub_is_asked_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.utils as tools

    asked: list[float] = []

    class Session:
        def get(self, *_: object, timeout: float, **__: object) -> None:
            asked.append(timeout)
            raise OSError("no network here")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(tools, "get_session", Session)
    found = hub.find_config("gpt2")
    assert "cannot be reached" in found.note
    assert found.values["n_embd"] == 768
    assert len(asked) == 1
    assert asked[0] <= 5
    with pytest.raises(UsageError, match="cannot be reached"):
        hub.find_config("nobody/nothing")


class _Answer:
    def __init__(self, status_code: int, content: bytes = b"") -> None:
        self.status_code = status_code
        self.content = content


@pytest.mark.parametrize(
    ("answer", "note", "width"),
    [
        (_Answer(200, b'{"model_type": "gpt2", "n_embd": 48}'), "", 48),
        (_Answer(401), "without a login", 768),
        (_Answer(404), "without a login", 768),
        (_Answer(503), "cannot be reached", 768),
    ],
)
def test_what_the_hub_answers(
    monkeypatch: pytest.MonkeyPatch, answer: _Answer, note: str, width: int
) -> None:
    import huggingface_hub.utils as tools

    class Session:
        def get(self, *_: object, timeout: float, **__: object) -> _Answer:
            assert timeout <= 5
            return answer

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(tools, "get_session", Session)
    found = hub.find_config("gpt2")
    assert found.values["n_embd"] == width
    assert note in found.note
    assert bool(note) == bool(found.note)


def test_models_of_functions_are_recognised(run: Runner) -> None:
    said = run("estimate", "cli_samples:transformer", "--batch", 2, "--seq", 16, "--device", "cpu", "--json")
    assert said.code == 0
    assert said.document["cases"][0]["sequence"] == 16
    run("estimate", "cli_samples:transformer", "--seq", 64, "--device", "cpu").refused("at most 32")


def test_sound_and_its_transcript_need_no_weights(run: Runner, tmp_path: Path) -> None:
    values = tiny("wav2vec2", conv_dim=[16] * 7).values
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = run("estimate", tmp_path, "--batch", 2, "--seq", 16_000, "--device", "cpu")
    assert said.code == 0, said.err
    assert "samples" in said.out
    assert "random weights" not in said.out


def test_a_model_that_needs_values_is_run_with_random_weights(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("longformer", attention_window=16).values))
    arguments = ("estimate", tmp_path, "--batch", 2, "--seq", 16, "--device", "cpu")
    said = run(*arguments)
    assert said.code == 0, said.err
    assert "built with random weights" in said.out

    class Full:
        available_bytes = 0

    monkeypatch.setattr("memscale.cli.workload.host_memory", Full)
    run(*arguments).refused("cannot be traced without data", "this machine has free")
