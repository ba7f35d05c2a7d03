# SPDX-License-Identifier: Apache-2.0
"""What `test_lightning_distributed` runs in two processes: a fit, with and without."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_samples import (
    BUDGET,
    assert_same_state,
    fitted,
    loader,
    module_class,
    package_of,
    state_of,
)
from memscale.integrations.lightning import MemScaleCallback

SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "fsdp2": {},
}


def sharded(package: Any) -> type[Any]:
    from torch.distributed.fsdp import fully_shard

    class Sharded(module_class(package)):  # type: ignore[misc]
        """Statistics of batches are not synchronized under FSDP2."""

        def configure_model(self) -> None:
            if isinstance(self.net.norm, nn.BatchNorm1d):
                self.net.norm = nn.Identity()
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    return Sharded


def run(name: str, folder: Path) -> dict[str, Any]:
    """Both fits on this rank. Every bit of the second must be that of the first."""
    settings, kind = dict(SETTINGS[name]), module_class
    if name == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        settings["strategy"], kind = ModelParallelStrategy(), sharded
    settings |= {"devices": 2, "use_distributed_sampler": True, "kind": kind, "data": loader()}
    plain = _local(state_of(*fitted(folder, **settings)))
    if name == "fsdp2":
        settings["strategy"] = ModelParallelStrategy()
    callback = MemScaleCallback(**BUDGET)
    planned = _local(state_of(*fitted(folder, [callback], **settings)))
    assert_same_state(plain, planned)
    assert callback.plan is not None
    return {"modules": [choice.module for choice in callback.plan.active], "compared": len(plain)}


def _local(state: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "_local_tensor", value) for name, value in state.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    package_of()
    rank, port, where = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    (where / f"{rank}.json").write_text(json.dumps({name: run(name, where) for name in SETTINGS}))
    os._exit(0)
