"""Machines that costs are predicted for: what their vendors say of them, and what a collective and a kernel take."""

import re
from dataclasses import dataclass, replace

from common.errors import ConfigError, flag


@dataclass(frozen=True)
class Protocol:
    """How devices exchange bytes: seconds of a collective of nothing, seconds of each step of its ring, bytes per
    second of one device in one direction."""

    latency: float
    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """So many devices of one kind, whose numbers these are: bytes of memory that are read per second; dense operations
    per second (a multiplication and an addition are two) with 16 and with 32 bits; bytes of memory; seconds that a
    kernel takes beside its work; how collectives may be made."""

    name: str
    bandwidth: float
    ops: float
    ops_32: float
    memory: float = float("inf")
    launch: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    devices: int = 1

    def collective_s(self, n_bytes: float, *, is_reduced: bool = True) -> float:
        """Seconds of an all-reduce (or a gather) of so many bytes by the quickest protocol: a ring, whose steps each
        move a share of `1 / devices`: Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117-124."""
        if self.devices == 1:
            return 0.0
        steps = (2 if is_reduced else 1) * (self.devices - 1)
        moved = steps * n_bytes / self.devices
        return min(one.latency + steps * one.hop + moved / one.bandwidth for one in self.protocols)


def _nccl(link: float, most: float, hops: tuple[float, float]) -> tuple[Protocol, Protocol]:
    """NCCL's own model of a ring within a node (v2.28, src/graph/tuning.cc), LL and LL128: LL sends a flag with every 4
    bytes, up to a bandwidth of its own; LL128 sends 120 bytes of 128, at 92% of the link's bandwidth."""
    return Protocol(6.6e-6, hops[0], min(link / 2, most)), Protocol(14e-6, hops[1], 0.92 * link)


NVLINK, PCIE = (0.6e-6, 1.9e-6), (1.0e-6, 2.5e-6)
AMPERE, HOPPER = 87.7e9, 141e9
# A kernel in a CUDA graph, on an H100: Hazy Research, "Look Ma, No Bubbles!", 2025-05-27.
LAUNCH = 1.3e-6
# NVIDIA's data sheets of A100 (SXM), H100 (SXM), H200, L40 and L40S: dense rates, which are half of those "with
# sparsity"; float32 outside of tensor cores; of NVLink and PCIe 4.0 x16, which they give for both directions, one.
MACHINES = {
    "A100-40": Machine("A100-40", 1.555e12, 312e12, 19.5e12, 40e9, LAUNCH, _nccl(300e9, AMPERE, NVLINK)),
    "A100-80": Machine("A100-80", 2.039e12, 312e12, 19.5e12, 80e9, LAUNCH, _nccl(300e9, AMPERE, NVLINK)),
    "H100": Machine("H100", 3.35e12, 989.4e12, 67e12, 80e9, LAUNCH, _nccl(450e9, HOPPER, NVLINK)),
    "H200": Machine("H200", 4.8e12, 989.4e12, 67e12, 141e9, LAUNCH, _nccl(450e9, HOPPER, NVLINK)),
    "L40": Machine("L40", 864e9, 181.05e12, 90.5e12, 48e9, LAUNCH, _nccl(32e9, AMPERE, PCIE)),
    "L40S": Machine("L40S", 864e9, 362.05e12, 91.6e12, 48e9, LAUNCH, _nccl(32e9, AMPERE, PCIE)),
}
MACHINES["A100"] = MACHINES["A100-80"]
NUMBERS = ("bandwidth", "ops", "ops_32", "memory", "launch", "link", "latency")
EXAMPLE = f"{flag('machine')} 8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5"


def find_machine(text: str) -> Machine:
    """Of "A100-80" or "8xA100-80", or of NUMBERS in SI units: "2xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5", where
    `ops_32` is `ops` unless it is given, and what else is not given takes no time. Errors: ConfigError.
    """
    count, name = re.fullmatch(r"(?:(\d{1,4})x)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    known = {one.casefold(): machine for one, machine in MACHINES.items()}
    devices = int(count or 1)
    machine = _given(text, name) if "=" in name else known.get(name.casefold())
    if machine is None or devices < 1:
        required = f"one of {', '.join(MACHINES)}, behind 8x for eight of them; or numbers"
        fix = f"use {flag('machine')} 8xA100, or your machine's numbers: {EXAMPLE}"
        raise ConfigError("no numbers are stored of this machine", flag("machine"), text, required, fix)
    if devices > 1 and not machine.protocols:
        what, required = "several devices need a link between them", "link=, in bytes per second"
        raise ConfigError(what, flag("machine"), text, required, "add link=3e11, or name one device")
    return replace(machine, name=text, devices=devices)


def _given(text: str, numbers: str) -> Machine:
    found: dict[str, float] = {}
    for part in numbers.split(","):
        key, _, value = part.partition("=")
        number = float(value) if re.fullmatch(r"\d+(\.\d*)?([eE][-+]?\d{1,3})?", value) else 0.0
        if key not in NUMBERS or not 0 < number < float("inf"):
            required = f"one of {', '.join(NUMBERS)}, and a number > 0"
            raise ConfigError(
                "a machine's number cannot be read", flag("machine"), part, required, f"write it like {EXAMPLE}"
            )
        found[key] = number
    if not {"bandwidth", "ops"} <= found.keys():
        required = "bandwidth= and ops= at least"
        raise ConfigError(
            "a machine's numbers are incomplete", flag("machine"), text, required, f"write them like {EXAMPLE}"
        )
    protocols = (Protocol(found.get("latency", 0.0), 0.0, found["link"]),) if "link" in found else ()
    own = {name: found[name] for name in ("memory", "launch") if name in found}
    rates = found["bandwidth"], found["ops"], found.get("ops_32", found["ops"])
    return replace(Machine(text, *rates, protocols=protocols), **own)  # type: ignore[arg-type]
