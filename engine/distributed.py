"""What torchrun says about this process."""

from __future__ import annotations

import os

from kv_cache.errors import ConfigError


def require_single_process() -> None:
    """Raise ConfigError if torchrun started more than one process: models are not sharded yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            "tensor parallelism is not available",
            where="torchrun --nproc_per_node",
            seen=f"{world_size} processes",
            required="1 process",
            fix="use --nproc_per_node=1, or run the script without torchrun",
        )
