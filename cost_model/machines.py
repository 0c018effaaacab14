"""Machines that costs are predicted for: what their vendors say of them, and what collectives and kernels take."""

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, flag


class Protocol(NamedTuple):
    """Of a collective: seconds of one of nothing and of each step of its ring, and bytes per second of a device."""

    latency: float
    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, in SI units. bandwidth: bytes of memory read. ops, ops_32: dense operations (a
    multiplication and an addition are two) with 16 and 32 bits. launch: of a kernel, beside its work. tile: rows of
    queries that attention multiplies at least. packs_group: heads that share KV are rows of one tile also where there
    are several tokens. unexplained: of a forward, by nothing else here."""

    bandwidth: float
    ops: float
    ops_32: float
    launch: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    devices: int = 1
    tile: int = 16  # an operand of tensor cores has 16 rows (NVIDIA, PTX ISA: mma.m16n8k16)
    packs_group: bool = True
    unexplained: float = 0.0

    def collective_s(self, n_bytes: float, *, is_reduced: bool = True) -> float:
        """Seconds of an all-reduce (or a gather) of so many bytes by the quickest protocol: a ring, whose steps each
        move a share of `1 / devices`: Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117-124."""
        if self.devices == 1:
            return 0.0
        steps = (2 if is_reduced else 1) * (self.devices - 1)
        moved = steps * n_bytes / self.devices
        return min(one.latency + steps * one.hop + moved / one.bandwidth for one in self.protocols)


def _known() -> dict[str, Machine]:
    """By name, by the numbers of machines.toml."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    protocols = {name: tuple(Protocol(*numbers) for numbers in each) for name, each in known["protocols"].items()}
    return {
        name: Machine(bandwidth, ops, ops_32, known["launch"], protocols[kind])
        for name, (kind, bandwidth, ops, ops_32) in known["devices"].items()
    }


MACHINES = _known()
NUMBERS = ("bandwidth", "ops", "ops_32", "launch", "link", "latency")
EXAMPLE = "8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5"


def find_machine(text: str) -> Machine:
    """Of "A100-80" or "8xA100-80", or of NUMBERS in SI units: "2xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5", where
    `ops_32` is `ops` unless it is given, and what else is not given takes no time. Errors: ConfigError."""
    count, name = re.fullmatch(r"(?:(\d{1,4})x)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    machine, devices = _given(name) if "=" in name else MACHINES.get(name.upper()), int(count or 1)
    if machine is None or devices < 1 or (devices > 1 and not machine.protocols):
        required = f"one of {', '.join(MACHINES)}, behind 8x for eight of them; or numbers above 0 "
        required += f"({', '.join(NUMBERS)}), of which it takes bandwidth, ops, and between several devices link"
        fix = f"use {flag('machine')} 8xA100, or {flag('machine')} {EXAMPLE}"
        raise ConfigError("nothing is known of this machine", flag("machine"), text, required, fix)
    return replace(machine, devices=devices)


def _given(numbers: str) -> Machine | None:
    """None where they cannot be read, or are not enough."""
    try:
        found: dict[str, Any] = {key: float(value) for key, value in (one.split("=") for one in numbers.split(","))}
    except ValueError:
        return None
    if not {"bandwidth", "ops"} <= found.keys() <= {*NUMBERS} or not all(0 < one < math.inf for one in found.values()):
        return None
    latency, link = found.pop("latency", 0.0), found.pop("link", None)
    return Machine(**{"ops_32": found["ops"]} | found, protocols=(Protocol(latency, 0.0, link),) if link else ())
