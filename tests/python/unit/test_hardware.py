# SPDX-License-Identifier: Apache-2.0
"""Hardware detection on stand-in machines, the table of rates, and the budget."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.config.config import Config
from memscale.errors import MemScaleError
from memscale.hardware import detect as hardware
from memscale.hardware import host
from memscale.hardware.cost_rates import KINDS, NEVER, TABLE, CostRates, card_cost, host_cost
from memscale.hardware.detect import Budget, Hardware, budget_bytes, card_hardware, detect
from memscale.hardware.rates import CARDS, CLASS_RATES, cpu_rates, gpu_rates
from processors import use_flags

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder that looks like the root of a machine with 16 GiB, 12 of them available."""
    meminfo = f"MemTotal:       {16 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {12 << 20} kB\nHugePages: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def memory_gib(root: Path) -> tuple[float, float]:
    memory = host.host_memory(root)
    return memory.total_bytes / GIB, memory.available_bytes / GIB


class TestHostMemory:
    def test_without_groups(self, tmp_path: Path) -> None:
        assert memory_gib(machine(tmp_path, {})) == (16, 12)

    def test_version_2_limit(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
        }
        assert memory_gib(machine(tmp_path, files)) == (4, 1)

    def test_version_2_cache_counts_as_available(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\nactive_file 7\ninactive_file {2 * GIB}\n",
        }
        assert memory_gib(machine(tmp_path, files)) == (4, 3)

    def test_the_narrowest_group_on_the_way_up_counts(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/a/b/c\n",
            "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{7 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/a/b/c/memory.max": "max\n",
        }
        assert memory_gib(machine(tmp_path, files)) == (6, 1)

    def test_a_container_that_sees_only_its_own_group(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "5:memory:/docker/0123abcd\n4:cpu,cpuacct:/docker/0123abcd\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        }
        assert memory_gib(machine(tmp_path, files)) == (2, 1.5)

    def test_version_1_without_a_limit(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "4:hugetlb,memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5",
        }
        assert memory_gib(machine(tmp_path, files)) == (16, 12)

    def test_both_versions_at_once(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "4:memory:/old\n0::/new\n",
            "sys/fs/cgroup/memory/old/memory.limit_in_bytes": f"{8 * GIB}",
            "sys/fs/cgroup/unified/new/memory.max": f"{5 * GIB}",
        }
        assert memory_gib(machine(tmp_path, files)) == (5, 5)

    def test_a_group_above_its_limit_leaves_nothing(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}",
            "sys/fs/cgroup/memory.current": f"{5 * GIB}",
        }
        assert memory_gib(machine(tmp_path, files)) == (4, 0)

    @pytest.mark.parametrize("cgroup", ["", "junk", "0::/../../etc", "::::", "x:memory", "4:name=systemd:/a"])
    def test_odd_group_files_are_survived(self, tmp_path: Path, cgroup: str) -> None:
        assert memory_gib(machine(tmp_path, {"proc/self/cgroup": cgroup})) == (16, 12)

    def test_without_proc_the_system_is_asked(self, tmp_path: Path) -> None:
        memory = host.host_memory(tmp_path)
        assert memory.total_bytes > 0
        assert 0 < memory.available_bytes <= memory.total_bytes

    def test_nothing_known_is_zero(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.sysconf")
        assert host.host_memory(tmp_path) == host.HostMemory(0, 0)

    def test_this_machine(self) -> None:
        memory = host.host_memory()
        assert memory.total_bytes > 256 << 20
        assert 0 < memory.available_bytes <= memory.total_bytes


class TestHostFacts:
    def test_process_bytes(self, tmp_path: Path) -> None:
        machine(tmp_path, {"proc/self/status": "Name:\tx\nVmHWM:\t  9 kB\nVmRSS:\t  2048 kB\nThreads:\t3\n"})
        assert host.process_bytes(tmp_path) == 2 << 20
        assert host.process_bytes(tmp_path / "nowhere") == 0

    @pytest.mark.parametrize(
        ("release", "wsl"),
        [
            ("5.15.90.1-microsoft-standard-WSL2\n", True),
            ("4.4.0-19041-Microsoft\n", True),
            ("6.1.0-18-amd64\n", False),
        ],
    )
    def test_wsl(self, tmp_path: Path, release: str, wsl: bool) -> None:
        assert host.is_wsl(machine(tmp_path, {"proc/sys/kernel/osrelease": release})) is wsl

    def test_no_proc_is_no_wsl(self, tmp_path: Path) -> None:
        assert host.is_wsl(tmp_path) is False

    def test_cpu_flags(self, tmp_path: Path) -> None:
        machine(
            tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\n\nflags\t\t: other\n"}
        )
        assert host.cpu_flags(tmp_path) == {"fpu", "avx512_bf16", "sse"}
        assert host.cpu_flags(tmp_path / "nowhere") == frozenset()

    @pytest.mark.skipif(sys.platform == "win32", reason="no ulimit")
    def test_pinned_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import resource

        monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, resource.RLIM_INFINITY))
        assert host.pinned_limit_bytes() == 65536
        monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert host.pinned_limit_bytes() is None


class TestRates:
    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("Tesla T4", "T4"),
            ("Tesla V100-SXM2-16GB", "V100"),
            ("NVIDIA A100-SXM4-40GB", "A100"),
            ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
            ("NVIDIA A100 80GB PCIe", "A100 80GB"),
            ("NVIDIA A10", "A10"),
            ("NVIDIA A10G", "A10G"),
            ("NVIDIA L4", "L4"),
            ("NVIDIA L40", "L40"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA H200", "H200"),
            ("NVIDIA GH200 480GB", "GH200"),
            ("NVIDIA RTX A6000", "A6000"),
            ("NVIDIA RTX 6000 Ada Generation", "6000 Ada"),
            ("NVIDIA GeForce RTX 2080 Ti", "2080 Ti"),
            ("NVIDIA GeForce RTX 3060", "3060"),
            ("NVIDIA GeForce RTX 3090", "3090"),
            ("nvidia geforce rtx 3090 ti", "3090 Ti"),
            ("NVIDIA GeForce RTX 4070 SUPER", "4070"),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", "4090"),
            ("NVIDIA GeForce RTX 5090", "5090"),
        ],
    )
    def test_cards_by_name(self, name: str, key: str) -> None:
        assert gpu_rates(name, (1, 0)) == CARDS[key].rates()

    @pytest.mark.parametrize(
        ("capability", "key"),
        [
            ((6, 1), "P100"),
            ((7, 0), "V100"),
            ((7, 5), "2070"),
            ((8, 0), "A100"),
            ((8, 6), "3070"),
            ((8, 7), "3070"),
            ((8, 9), "4070"),
            ((9, 0), "H100 PCIe"),
            ((10, 3), "B200"),
            ((12, 1), "5070"),
            ((99, 0), "5070"),
        ],
    )
    def test_unknown_cards_by_generation(self, capability: tuple[int, int], key: str) -> None:
        assert gpu_rates("NVIDIA Graphics Device", capability) == CARDS[key].rates()

    def test_classes_fall(self) -> None:
        lowest = [capability for capability, _ in CLASS_RATES]
        assert lowest == sorted(lowest, reverse=True)

    def test_rates_are_positive_integers_in_order(self) -> None:
        for key, card in CARDS.items():
            rates = card.rates()
            assert all(type(value) is int and value > 0 for value in dataclasses.astuple(rates)), key
            assert rates.flops_per_us <= rates.tf32_flops_per_us <= rates.half_flops_per_us, key
            assert rates.link_bytes_per_us < rates.moved_bytes_per_us, key

    def test_known_magnitudes(self) -> None:
        rates = gpu_rates("NVIDIA GeForce RTX 3090", (8, 6))
        assert rates.half_flops_per_us == 35_500_000  # 35.5 TFLOP/s
        assert rates.moved_bytes_per_us == 748_800  # 748.8 GB/s
        assert rates.link_bytes_per_us == 25_000

    def test_a_host_of_two_threads(self) -> None:
        rates = cpu_rates(2)
        assert (rates.flops_per_us, rates.moved_bytes_per_us, rates.link_bytes_per_us) == (
            80_000,
            40_000,
            20_000,
        )

    @given(st.integers(1, 1024))
    def test_more_threads_are_never_slower(self, threads: int) -> None:
        one, other = cpu_rates(threads), cpu_rates(threads + 1)
        assert other.flops_per_us > one.flops_per_us
        assert other.moved_bytes_per_us >= one.moved_bytes_per_us

    def test_no_threads_counts_as_one(self) -> None:
        assert cpu_rates(0) == cpu_rates(1)

    @given(st.integers(1, 256))
    def test_rates_per_class_of_a_host(self, threads: int) -> None:
        one, other = (host_cost(cpu_rates(count), count, True) for count in (threads, threads + 1))
        for part in ("flops_per_us", "moved_bytes_per_us"):
            assert len(getattr(one, part)) == len(KINDS)
            assert all(0 < a <= b for a, b in zip(getattr(one, part), getattr(other, part), strict=True))
        assert one.source == TABLE
        plain = host_cost(cpu_rates(threads), threads, False)
        assert plain.flops_of("matrix_half") < plain.flops_of("matrix") < one.flops_of("matrix_half")
        assert (
            one.bytes_of("random") < one.bytes_of("slow_math") <= one.bytes_of("math") <= one.bytes_of("move")
        )

    def test_rates_per_class_of_every_card(self) -> None:
        for key, card in CARDS.items():
            cost = card_cost(card.rates(), card.rates().flops_per_us)
            numbers = (*cost.flops_per_us, *cost.moved_bytes_per_us)
            assert len(numbers) == 2 * len(KINDS) and all(type(n) is int and n > 0 for n in numbers), key
            assert cost.flops_of("matrix_half") >= cost.flops_of("matrix") > cost.flops_of("grouped"), key
            assert (cost.fresh_from_bytes, cost.source) == (NEVER, TABLE), key


class TestDetectCpu:
    def test_the_facts(self) -> None:
        found = detect(torch.device("cpu"))
        assert (found.device_kind, found.device_index, found.compute_capability) == ("cpu", 0, None)
        assert found.total_bytes == found.host_total_bytes > 0
        assert found.free_bytes == found.host_available_bytes
        assert found.cpu_threads == torch.get_num_threads()
        assert found.context_bytes == 0
        assert found.process_bytes > 10 << 20

    def test_two_runs_differ_only_in_what_is_of_the_moment(self) -> None:
        one, other = (dataclasses.asdict(detect(torch.device("cpu"))) for _ in range(2))
        for name in ("free_bytes", "host_available_bytes", "process_bytes"):
            del one[name], other[name]
        assert one == other

    def test_plain_values_only(self) -> None:
        found = detect(torch.device("cpu"))
        for owner in (found, found.cost):
            for field in dataclasses.fields(owner):
                kind = type(getattr(owner, field.name))
                assert kind in (int, bool, str, tuple, type(None), CostRates), field.name
        assert pickle.loads(pickle.dumps(found)) == found
        assert hash(found) is not None

    @pytest.mark.parametrize(
        ("flags", "bf16", "fp16"),
        [
            ({"avx2"}, False, False),
            ({"avx512_bf16"}, True, False),
            ({"amx_bf16", "amx_fp16"}, True, True),
            ({"bf16", "asimdhp"}, True, True),
        ],
    )
    def test_half_precision(
        self, flags: set[str], bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_flags(monkeypatch, flags)
        found = detect(torch.device("cpu"))
        assert (found.supports_bf16, found.supports_fp16) == (bf16, fp16)

    def test_cuda_stays_asleep(self) -> None:
        code = (
            "import torch\n"
            "def woken(*args, **kwargs): raise SystemExit('CUDA was initialised')\n"
            "torch.cuda._lazy_init = torch.cuda.is_available = torch._C._cuda_getDeviceCount = woken\n"
            "from memscale.hardware.detect import detect\n"
            "detect(torch.device('cpu'))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_other_devices_are_refused(self) -> None:
        with pytest.raises(MemScaleError, match=r"'meta'.*cpu and cuda"):
            detect(torch.device("meta"))


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that sees a T4 and a 3090; the 3090 is the current device."""
    names = ["Tesla T4", "NVIDIA GeForce RTX 3090"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(7, 5), (8, 6)][index])
    facts = [SimpleNamespace(multi_processor_count=40), SimpleNamespace(multi_processor_count=82)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts[index])
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: [(10 * GIB, 15 * GIB), (20 * GIB, 24 * GIB)][index]
    )
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)


@pytest.mark.usefixtures("two_cards")
class TestDetectCuda:
    def test_the_current_card(self) -> None:
        found = detect(torch.device("cuda"))
        assert (found.device_kind, found.device_index, found.name) == ("cuda", 1, "NVIDIA GeForce RTX 3090")
        assert (found.total_bytes, found.free_bytes) == (24 * GIB, 20 * GIB)
        assert (found.compute_capability, found.multiprocessors) == ((8, 6), 82)
        assert (found.supports_bf16, found.supports_fp16) == (True, True)
        assert found.cost.bytes_of("move") == found.cost.bytes_of("matrix_half") == 748_800
        assert found.cost.flops_of("matrix_half") == 35_500_000
        assert found.host_total_bytes == host.host_memory().total_bytes

    def test_a_card_by_index(self) -> None:
        found = detect(torch.device("cuda", 0))
        assert (found.device_index, found.name, found.multiprocessors) == (0, "Tesla T4", 40)
        assert (found.supports_bf16, found.supports_fp16) == (False, True)

    def test_neither_half_precision_below_7(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
        found = detect(torch.device("cuda", 0))
        assert (found.supports_bf16, found.supports_fp16) == (False, False)

    def test_a_missing_index_is_refused(self) -> None:
        with pytest.raises(MemScaleError, match=r"'cuda:2'.*2 CUDA device"):
            detect(torch.device("cuda", 2))

    def test_no_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(MemScaleError, match="is_available"):
            detect(torch.device("cuda"))

    def test_tf32_follows_pytorchs_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = gpu_rates("NVIDIA A100-SXM4-40GB", (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
        for precision, expected in [
            ("highest", rates.flops_per_us),
            ("high", rates.tf32_flops_per_us),
            ("medium", rates.tf32_flops_per_us),
        ]:
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda text=precision: text)
            assert detect(torch.device("cuda")).cost.flops_of("matrix") == expected

    def test_a_setting_that_pytorch_cannot_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def confused() -> str:
            raise RuntimeError("PyTorch is checking whether allow_tf32 is enabled...")

        monkeypatch.setattr(torch, "get_float32_matmul_precision", confused)
        rates = gpu_rates("NVIDIA GeForce RTX 3090", (8, 6))
        assert detect(torch.device("cuda")).cost.flops_of("matrix") == rates.flops_per_us

    @pytest.mark.parametrize(("value", "size"), [("LAZY", 512 << 20), ("eager", 1 << 30), ("", 512 << 20)])
    def test_the_context_follows_how_kernels_are_loaded(
        self, value: str, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_MODULE_LOADING", value)
        assert detect(torch.device("cuda")).context_bytes == size

    @pytest.mark.parametrize(("value", "size"), [("", 800 << 20), ("EAGER", 1536 << 20)])
    def test_the_context_of_a_hopper_card(
        self, value: str, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_MODULE_LOADING", value)
        assert card_hardware("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB).context_bytes == size


def device(kind: str = "cuda", total: int = 24 * GIB) -> Hardware:
    cpu = detect(torch.device("cpu"))
    return dataclasses.replace(cpu, device_kind=kind, name="stand-in", total_bytes=total)


class TestBudget:
    def test_a_share_of_the_device(self) -> None:
        assert budget_bytes(Config(), device()) == Budget(24 * GIB * 85 // 100, "85 % of 24.00 GiB")
        share = Config(target_gpu_utilization=0.333333)
        assert budget_bytes(share, device(total=3_000_000)) == Budget(999_999, "33.3333 % of 2.86 MiB")

    def test_all_of_it(self) -> None:
        assert budget_bytes(Config(target_gpu_utilization=1), device()).bytes == 24 * GIB

    @pytest.mark.parametrize(("asked", "size"), [("8GiB", 8 * GIB), (5 * GIB, 5 * GIB)])
    @pytest.mark.parametrize("kind", ["cpu", "cuda"])
    def test_an_absolute_budget_overrides_the_share(self, kind: str, asked: int | str, size: int) -> None:
        found = budget_bytes(Config(memory_budget=asked, target_gpu_utilization=0.1), device(kind))
        assert found == Budget(size, f"memory_budget={asked!r}")

    def test_a_card_caps_the_budget_and_a_host_does_not(self) -> None:
        config = Config(memory_budget="30GiB")
        capped = budget_bytes(config, device("cuda"))
        assert capped.bytes == 24 * GIB
        assert capped.source == "memory_budget='30GiB', capped at the 24.00 GiB there are"
        assert budget_bytes(config, device("cpu")).bytes == 30 * GIB

    def test_unknown_memory_needs_a_budget(self) -> None:
        with pytest.raises(MemScaleError, match="give memory_budget"):
            budget_bytes(Config(), device("cpu", total=0))
        assert budget_bytes(Config(memory_budget=7), device("cpu", total=0)).bytes == 7

    @given(st.floats(0, 1, exclude_min=True), st.integers(1, 1 << 50))
    def test_a_share_is_within_the_device(self, share: float, total: int) -> None:
        found = budget_bytes(Config(target_gpu_utilization=share), device(total=total))
        assert 1 <= found.bytes <= total


def test_public_names() -> None:
    assert set(hardware.__all__) == {"Budget", "Hardware", "budget_bytes", "card_hardware", "detect"}
