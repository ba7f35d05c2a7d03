# SPDX-License-Identifier: Apache-2.0
"""How a model is trained, on the command line: adapters, quantised bases, optimizers, accumulation.

What `memscale estimate` says is held against the same training on the CPU, measured by PyTorch's allocator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cli_samples import Runner
from memscale.cli.optimizers import Lion
from zoo.training import peak_bytes

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}  # fmt: skip
BATCH, SEQ = 4, 128
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "float32", "bnb_4bit_use_double_quant": True,
}  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Runner(capsys)


@pytest.fixture
def said(run: Runner, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The estimate of the small model as a document; a `dict` among the arguments is its quantization."""

    def estimate(*more: Any) -> dict[str, Any]:
        quantization = next((item for item in more if isinstance(item, dict)), None)
        values = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(values))
        options = [item for item in more if not isinstance(item, dict)]
        found = run(
            "estimate", tmp_path, "--batch", BATCH, "--seq", SEQ, "--device", "cpu", "--json", *options
        )
        assert found.code == 0, found.err
        return found.document

    return estimate


def peak(document: dict[str, Any]) -> int:
    size: int = document["cases"][0]["plain"]["allocated_peak_bytes"]
    return size


def categories(document: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = document["cases"][0]["plain"]["by_category"]
    return found


def train(
    prepare: Callable[[nn.Module], object] = lambda model: None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    accumulate: int = 1,
) -> None:
    """Two steps for real."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).train()
    prepare(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    made = optimizer(trained)
    ids = torch.full((BATCH, SEQ), 3)
    batch = {"input_ids": ids, "labels": ids.clone()}
    for _ in range(2):
        for _ in range(accumulate):
            output = None  # which is held until the next forward
            output = model(**batch)
            output.loss.backward()
        made.step()
        made.zero_grad()


def close(found: int, truth: int, share: float = 0.02) -> None:
    assert abs(found - truth) <= share * truth, (found, truth, found / truth)


def lora(model: nn.Module, rank: int = 8, **more: Any) -> None:
    peft.get_peft_model(model, peft.LoraConfig(r=rank, **{"target_modules": "all-linear", **more}))


# ---- adapters --------------------------------------------------------------------------------------


def test_lora_takes_what_it_takes(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--lora", 8)
    close(peak(found), peak_bytes(lambda: train(lora)))
    about = found["model"]
    assert about["lora"] == {"rank": 8, "targets": ["all-linear"]}
    assert about["trained"] < about["parameters"] / 10
    assert peak(found) < peak(said())


@pytest.mark.parametrize("dtype", ["bf16", "bf16-amp"])
def test_lora_in_half_precision(said: Callable[..., dict[str, Any]], dtype: str) -> None:
    def prepare(model: Any) -> None:
        if dtype == "bf16":
            model.to(torch.bfloat16)
        else:
            model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
        lora(model)

    close(peak(said("--lora", 8, "--dtype", dtype)), peak_bytes(lambda: train(prepare)))


def test_lora_on_some_layers(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--lora", 16, "--lora-targets", "q_proj,v_proj")
    close(
        peak(found),
        peak_bytes(lambda: train(lambda model: lora(model, 16, target_modules=["q_proj", "v_proj"]))),
    )
    assert found["model"]["trained"] == 4 * 2 * 16 * (128 + 128)


def test_a_folder_of_an_adapter(run: Runner, tmp_path: Path, said: Callable[..., dict[str, Any]]) -> None:
    asked = said("--lora", 8, "--lora-targets", "q_proj")
    folder = tmp_path / "adapter"
    config = peft.LoraConfig(
        r=8, target_modules=["q_proj"], base_model_name_or_path=str(tmp_path), task_type="CAUSAL_LM",
        inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(folder)
    sizes = ("--batch", BATCH, "--seq", SEQ, "--device", "cpu", "--json")
    found = run("estimate", folder, *sizes).document
    assert found["model"]["lora"] == {"rank": 8, "targets": ["q_proj"]}
    assert found["model"]["trained"] == asked["model"]["trained"]
    assert peak(found) == peak(asked)
    run("estimate", folder, "--lora", 4).refused("--lora", "rank 8 already")
    for change, text in (
        ({"peft_type": "IA3"}, "allowed: 'LORA'"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"r": 0}, "r is 0"),
        ({"base_model_name_or_path": str(folder)}, "is an adapter itself"),
    ):
        values = {**json.loads((folder / "adapter_config.json").read_text()), **change}
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(values))
        run("estimate", tmp_path / "other").refused(text)


def test_a_new_head_is_trained_beside_adapters(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = ("--lora", 8, "--task", "sequence-classification", "--seq", 32, "--device", "cpu", "--json")
    found = run("estimate", tmp_path, *options).document["model"]
    alone = run("estimate", tmp_path, "--lora", 8, "--seq", 32, "--device", "cpu", "--json").document["model"]
    assert found["trained"] == alone["trained"] + 2 * 128


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--lora-targets", "q_proj"), ["--lora-targets", "--lora R"]),
        (("--lora", "0"), ["--lora", "'0'"]),
        (("--lora", "8", "--lora-targets", "nothing_there"), ["--lora 8", "nothing_there"]),
        (("--checkpointing", "mine"), ["'mine'", "hf"]),
        (("--accumulate", "none"), ["--accumulate"]),
        (("--accumulate", "2", "--savings"), ["--accumulate 2", "--savings"]),
    ],
)
def test_what_makes_no_sense(run: Runner, tmp_path: Path, options: tuple[str, ...], texts: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run("estimate", tmp_path, "--device", "cpu", *options).refused(*texts)


def test_functions_take_the_same_options(run: Runner) -> None:
    plain = run("estimate", "cli_samples:transformer", "--device", "cpu", "--json").document
    found = run("estimate", "cli_samples:transformer", "--device", "cpu", "--json", "--lora", 4).document
    assert categories(found)["parameter"] > categories(plain)["parameter"]
    assert found["model"]["parameters"] == plain["model"]["parameters"] > found["model"]["trained"]
    named = run("estimate", "cli_samples:sized", "--lora", 4, "--lora-targets", "head", "--device", "cpu")
    assert named.code == 0, named.err
    run("estimate", "cli_samples:sized", "--checkpointing", "hf", "--device", "cpu").refused(
        "--checkpointing hf"
    )


# ---- quantised bases -------------------------------------------------------------------------------


class Unpacked(torch.autograd.Function):
    """A product with a weight that is unpacked twice: in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x @ layer.weight_of_its_own().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight_of_its_own(), None


class OfGptq(nn.Linear):
    """A layer with the tensors of a GPTQ checkpoint, in groups of 64."""

    def __init__(self, ins: int, outs: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias, self.weight = ins, outs, None, None
        self.register_buffer("qweight", torch.zeros(ins // 8, outs, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(ins // 64, outs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(ins // 64, outs, dtype=torch.float16))
        self.register_buffer("g_idx", torch.arange(ins, dtype=torch.int32) // 64)

    def weight_of_its_own(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Unpacked.apply(x, self)
        return out


def of_gptq(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, OfGptq(module.in_features, module.out_features))
    lora(model)


def test_a_gptq_base_has_the_bytes_of_its_format(said: Callable[..., dict[str, Any]]) -> None:
    found = said(GPTQ, "--lora", 8, "--dtype", "fp32")
    close(peak(found), peak_bytes(lambda: train(of_gptq)))
    assert found["model"]["quantization"] == "GPTQ 4-bit"
    assert found["model"]["parameters"] == said()["model"]["parameters"]


def test_a_bitsandbytes_base_has_the_bytes_of_its_format(said: Callable[..., dict[str, Any]]) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def quantised(model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                layer = bnb.nn.Linear4bit(
                    module.in_features, module.out_features, bias=False, compute_dtype=torch.float32,
                    quant_type="nf4",
                )  # fmt: skip
                model.set_submodule(name, layer)
        model.to("cpu")
        lora(model)

    close(peak(said(NF4, "--lora", 8, "--dtype", "fp32")), peak_bytes(lambda: train(quantised)))


def weights_of(document: dict[str, Any]) -> int:
    return categories(document)["parameter"] + categories(document).get("buffer", 0)


@pytest.mark.parametrize(
    ("quantization", "per_weight", "slack"),
    [
        (GPTQ, 0.5 + (2 + 0.5) / 64, 0.05),
        ({**GPTQ, "bits": 8, "group_size": -1}, 1, 0.05),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + (2 + 0.5) / 128, 0.01),
        (NF4, 0.5 + (1 + 4 / 256) / 64, 0.05),
        ({**NF4, "bnb_4bit_use_double_quant": False}, 0.5 + 4 / 64, 0.01),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1, 0.05),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2, 0.01),
    ],
)
def test_bytes_per_weight(
    said: Callable[..., dict[str, Any]], quantization: dict[str, Any], per_weight: float, slack: float
) -> None:
    layers = 4 * (4 * 128**2 + 3 * 128 * 256)
    rest = 2 * (2 * 512 * 128 + (2 * 4 + 1) * 128)  # embeddings, head, norms in BF16
    found = said(quantization, "--lora", 8)
    held = weights_of(found) - rest - 4 * found["model"]["trained"]
    assert layers * per_weight <= held <= layers * (per_weight + slack)
    assert found["model"]["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("quantization", "options", "texts"),
    [
        (GPTQ, (), ["GPTQ 4-bit", "--lora N", "without quantization_config"]),
        ({"quant_method": "mxfp4"}, ("--lora", 8), ["MXFP4", "dequantize=True"]),
        ({"quant_method": "hqq"}, ("--lora", 8), ["'hqq'", "awq, bitsandbytes, fp8, gptq"]),
        ({**GPTQ, "bits": 5}, ("--lora", 8), ["bits is 5", "2, 3, 4, 8"]),
        ({**GPTQ, "group_size": 0}, ("--lora", 8), ["group_size is 0"]),
        ({**GPTQ, "dynamic": {"x": {}}}, ("--lora", 8), ["dynamic is not counted"]),
        ({**NF4, "bnb_4bit_compute_dtype": "int8"}, ("--lora", 8), ["bnb_4bit_compute_dtype is 'int8'"]),
        ({"quant_method": "fp8", "weight_block_size": 3}, ("--lora", 8), ["weight_block_size is 3"]),
        (["gptq"], ("--lora", 8), ["quantization_config is ['gptq']"]),
    ],
)
def test_formats_that_are_not_counted(
    run: Runner, tmp_path: Path, quantization: Any, options: tuple[Any, ...], texts: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    run("estimate", tmp_path, "--device", "cpu", *options).refused(*texts)


def test_experts_in_one_tensor_are_refused(run: Runner, tmp_path: Path) -> None:
    values = {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4,
        "quantization_config": {"quant_method": "awq"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    run("estimate", tmp_path, "--lora", 8, "--device", "cpu").refused("experts", "one tensor")


# ---- checkpoints, accumulation, optimizers -----------------------------------------------------------


def test_checkpoints_of_transformers_are_traced(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--checkpointing", "hf")

    def prepare(model: Any) -> None:
        model.activation_checkpointing_enable({"use_reentrant": False})

    close(peak(found), peak_bytes(lambda: train(prepare)))
    assert peak(found) < peak(said())
    assert found["model"]["checkpointing"] == "hf"


def test_accumulation_has_gradients_before_the_forward(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--accumulate", 3, "--optimizer", "sgd")
    truth = peak_bytes(
        lambda: train(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1), accumulate=3)
    )
    close(peak(found), truth)
    assert peak(found) > peak(said("--optimizer", "sgd"))
    assert found["model"]["accumulate"] == 3


def test_all_of_it_at_once(said: Callable[..., dict[str, Any]]) -> None:
    options = (
        "--lora",
        8,
        "--checkpointing",
        "hf",
        "--accumulate",
        2,
        "--optimizer",
        "lion",
        "--dtype",
        "fp32",
    )

    def prepare(model: Any) -> None:
        of_gptq(model)
        model.activation_checkpointing_enable({"use_reentrant": False})

    close(peak(said(GPTQ, *options)), peak_bytes(lambda: train(prepare, Lion, 2)))


def test_lion_keeps_one_moment(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--optimizer", "lion")
    assert categories(found)["optimizer_state"] == 4 * found["model"]["parameters"]
    close(peak(found), peak_bytes(lambda: train(optimizer=Lion)))


def test_lion_steps_as_its_authors_write_it() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([1.0, -2.0]) * 0.95 - 0.1 * torch.tensor([1.0, -1.0]))
    assert torch.allclose(optimizer.state[weight]["exp_avg"], 0.01 * torch.tensor([3.0, -4.0]))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_has_adamw_beside_it(said: Callable[..., dict[str, Any]]) -> None:
    found = said("--optimizer", "muon")
    layers, rest = 4 * (4 * 128**2 + 3 * 128 * 256), 2 * 512 * 128 + 9 * 128
    assert 0 <= categories(found)["optimizer_state"] - 4 * (layers + 2 * rest) <= 4 * 100  # counters

    def both(weights: list[nn.Parameter]) -> Any:
        matrices = [weight for weight in weights if weight.dim() == 2 and 512 not in weight.shape]
        return Both(matrices, [weight for weight in weights if all(weight is not item for item in matrices)])

    close(peak(found), peak_bytes(lambda: train(optimizer=both)))


class Both:
    """Muon for some weights, AdamW for others."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        self.parts = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def test_adamw8bit_is_the_state_of_the_full_stack(said: Callable[..., dict[str, Any]]) -> None:
    from memscale.optim import take_over

    def ours(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(weights)
        assert take_over(optimizer) == ""
        return optimizer

    found = said("--optimizer", "adamw8bit")
    close(peak(found), peak_bytes(lambda: train(optimizer=ours)))
    narrow, wide = categories(found)["optimizer_state"], categories(said())["optimizer_state"]
    assert narrow < 0.3 * wide
    assert categories(said("--mode", "aggressive"))["optimizer_state"] == narrow


def test_a_graph_has_its_recipe_inside(run: Runner, tmp_path: Path) -> None:
    from core_samples import chain

    path = tmp_path / "step.graph"
    chain(4).save(path)
    for option in (("--lora", 8), ("--accumulate", 2), ("--checkpointing", "hf")):
        run("estimate", path, "--device", "cpu", *option).refused(str(option[0]), "is a graph")


def test_the_screen_says_what_is_trained(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": GPTQ}))
    options = ("--lora", 8, "--accumulate", 4, "--checkpointing", "hf", "--seq", 32, "--device", "cpu")
    for command in ("estimate", "plan"):
        out = run(command, tmp_path, *options).out
        for text in ("GPTQ 4-bit", "LoRA 8 on all-linear", "4 micro-batches", "transformers' checkpoints"):
            assert text in out
