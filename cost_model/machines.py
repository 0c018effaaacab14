"""Machines that costs are predicted for: vendors' numbers, collectives and kernels."""

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import flag, refuse


class Collective(NamedTuple):
    """A protocol of collectives. latency: seconds of an empty call. hop: seconds of a step of its ring. bandwidth:
    bytes per second of a device."""

    latency: float
    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Equal devices, in SI units. bandwidth: bytes of memory read per second. ops, ops_32: dense operations (a
    multiplication and an addition are two) per second in 16 and 32 bits. launch: seconds to launch a kernel. tile: the
    fewest rows of queries that attention multiplies. packs_group: True if heads that share KV are rows of the same
    tile, also for several tokens. unexplained: seconds of a forward that no other number explains. linear,
    linear_8_bits, linear_4_bits, attention: shares of the bandwidth that products with weights in 16, 8 and 4 bits and
    attention reach. kernels: the number in a layer (norm, QKV, rotation, append, attention, combination, output, norm,
    up and gate, product, down)."""

    bandwidth: float
    ops: float
    ops_32: float
    launch: float = 0.0
    protocols: tuple[Collective, ...] = ()
    devices: int = 1
    tile: int = 16  # an operand of tensor cores has 16 rows (NVIDIA, PTX ISA: mma.m16n8k16)
    packs_group: bool = True
    unexplained: float = 0.0
    memory: float = math.inf
    linear: float = 1.0
    linear_8_bits: float = 1.0
    linear_4_bits: float = 1.0
    attention: float = 1.0
    kernels: int = 11

    def collective_s(self, n_bytes: float, *, is_reduced: bool = True) -> float:
        """Return the seconds of an all-reduce (or a gather) by the quickest protocol: a ring, whose steps each move a
        share of `1 / devices` (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117-124)."""
        if self.devices == 1:
            return 0.0
        steps = (2 if is_reduced else 1) * (self.devices - 1)
        moved = steps * n_bytes / self.devices
        return min(kind.latency + steps * kind.hop + moved / kind.bandwidth for kind in self.protocols)


def _known() -> dict[str, Machine]:
    """Return the machines of machines.toml by name; H200-MEASURED is an H200 whose kernels are as fast as measured."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    protocols = {name: tuple(Collective(*numbers) for numbers in each) for name, each in known["protocols"].items()}
    machines = {
        name: Machine(bandwidth, ops, ops_32, known["launch"], protocols[kind], memory=memory)
        for name, (kind, bandwidth, ops, ops_32, memory) in known["devices"].items()
    }
    measured = {f"{name}-MEASURED": replace(machines[name], **found) for name, found in known["measured"].items()}
    return machines | measured


MACHINES = _known()
NUMBERS = ("bandwidth", "ops", "ops_32", "launch", "link", "latency", "memory")
EXAMPLE = "8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5"


def find_machine(text: str) -> Machine:
    """Return the machine that a text names: "A100-80", "8xA100-80", or NUMBERS in SI units as in EXAMPLE.

    Without `ops_32` it is `ops`; other missing numbers take no time. Errors: ConfigError.
    """
    count, name = re.fullmatch(r"(?:(\d{1,4})x)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    machine, devices = _given(name) if "=" in name else MACHINES.get(name.upper()), int(count or 1)
    if machine is None or devices < 1 or (devices > 1 and not machine.protocols):
        required = f"one of {', '.join(MACHINES)}, or bandwidth, ops and, for several devices, link, all above 0"
        fix = f"use {flag('machine')} 8xA100, or {flag('machine')} {EXAMPLE}"
        refuse("machine", text, required, "this machine is unknown", fix)
    return replace(machine, devices=devices)


def _given(numbers: str) -> Machine | None:
    """Return the machine of these numbers; None if they cannot be read, or too few are given."""
    try:
        pairs = (number.split("=") for number in numbers.split(","))
        found: dict[str, Any] = {key: float(value) for key, value in pairs}
    except ValueError:
        return None
    if not {"bandwidth", "ops"} <= found.keys() <= {*NUMBERS}:
        return None
    if not all(0 < value < math.inf for value in found.values()):
        return None
    latency, link = found.pop("latency", 0.0), found.pop("link", None)
    return Machine(**{"ops_32": found["ops"]} | found, protocols=(Collective(latency, 0.0, link),) if link else ())
