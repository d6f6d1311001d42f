"""The catalogue: GPUs and unified-memory machines that a plan can be made for unseen.

The figures come from the makers' data sheets and were not measured by us, so predictions made from
them are estimates. A size in a name counts as GiB, and the part of it that an idle driver holds is
estimated; on the machine itself `--device cuda:0` reads the real numbers. Links count one
direction: PCIe 3, 4 and 5 with 16 lanes move 16, 32 and 63 GB/s, half of that with 8 lanes.
Arithmetic is the dense 16-bit rate with f32 sums where the device has it, and only serves the speed
of prefill.
"""

import difflib
import re
from typing import NamedTuple

from headroom.errors import OptionError
from headroom.machine.devices import DeviceKind, DeviceSpec
from headroom.units import GIB, MIB

# Memory that NVIDIA's idle driver holds, without a display. Users report 0.22 GiB of 8, 0.31 to
# 0.45 of 24, 0.74 to 0.8 of 80 and 1.2 of 141 GiB.
DRIVER_BYTES, DRIVER_SHARE = 192 * MIB, 128  # a constant, and 1/128 of the card
# Cards that keep error-correcting codes (ECC) in their GDDR memory unless it is switched off, and
# the part of the memory that the codes take: a T4 of 16 GiB reports 15.0, an L4 of 24 GiB 22.5.
CHECKED = frozenset(("t4-16gb", "a10-24gb", "l4-24gb", "l40s-48gb"))
CHECK_SHARE = 16  # 1/16 of the card


class Entry(NamedTuple):
    """One row of the catalogue."""

    name: str  # ends in its capacity in GiB
    bandwidth: float  # GB/s of its own memory
    link: float  # GB/s to host memory; 0 where memory is shared with the host
    arch: str  # "sm86", "gfx1100" or "metal"
    tera: float  # 10^12 operations per second

    @property
    def gibibytes(self) -> int:
        """Capacity, as the name has it."""
        return int(self.name.rsplit("-", 1)[1].removesuffix("gb"))


_ROWS = """
gtx1060-6gb         192  16 sm61      4.4
gtx1070-8gb         256  16 sm61      6.5
gtx1080-8gb         320  16 sm61      8.9
gtx1080ti-11gb      484  16 sm61     11.3
gtx1660super-6gb    336  16 sm75     10.0
rtx2060-6gb         336  16 sm75     25.8
rtx2060-12gb        336  16 sm75     28.7
rtx2070-8gb         448  16 sm75     29.9
rtx2080-8gb         448  16 sm75     40.3
rtx2080ti-11gb      616  16 sm75     53.8
rtx2080ti-22gb      616  16 sm75     53.8
titanrtx-24gb       672  16 sm75    130.5
rtx3050-8gb         224  16 sm86     18.2
rtx3060-8gb         240  32 sm86     25.5
rtx3060-12gb        360  32 sm86     25.5
rtx3060ti-8gb       448  32 sm86     32.4
rtx3070-8gb         448  32 sm86     40.6
rtx3070ti-8gb       608  32 sm86     43.5
rtx3080-10gb        760  32 sm86     59.5
rtx3080-12gb        912  32 sm86     61.3
rtx3080ti-12gb      912  32 sm86     68.2
rtx3090-24gb        936  32 sm86     71.2
rtx3090ti-24gb     1008  32 sm86     80.0
rtx4060-8gb         272  16 sm89     30.2
rtx4060ti-8gb       288  16 sm89     44.1
rtx4060ti-16gb      288  16 sm89     44.1
rtx4070-12gb        504  32 sm89     58.3
rtx4070super-12gb   504  32 sm89     71.0
rtx4070ti-12gb      504  32 sm89     80.2
rtx4070tisuper-16gb 672  32 sm89     88.2
rtx4080-16gb        717  32 sm89     97.5
rtx4080super-16gb   736  32 sm89    104.4
rtx4090-24gb       1008  32 sm89    165.2
rtx5060-8gb         448  32 sm120    38.4
rtx5060ti-8gb       448  32 sm120    47.4
rtx5060ti-16gb      448  32 sm120    47.4
rtx5070-12gb        672  63 sm120    61.7
rtx5070ti-16gb      896  63 sm120    87.9
rtx5080-16gb        960  63 sm120   112.6
rtx5090-32gb       1792  63 sm120   209.5
p40-24gb            347  16 sm61     11.8
p100-16gb           732  16 sm60     18.7
t4-16gb             320  16 sm75     65.0
v100-16gb           900  16 sm70    125.0
v100-32gb           900  16 sm70    125.0
rtxa2000-12gb       288  32 sm86     31.9
rtxa4000-16gb       448  32 sm86     76.7
rtxa5000-24gb       768  32 sm86    111.1
rtxa6000-48gb       768  32 sm86    154.8
a10-24gb            600  32 sm86    125.0
a100-40gb          1555  32 sm80    312.0
a100-80gb          2039  32 sm80    312.0
l4-24gb             300  32 sm89    121.0
l40s-48gb           864  32 sm89    362.0
rtx6000ada-48gb     960  32 sm89    364.0
rtxpro6000-96gb    1792  63 sm120   503.8
h100-80gb          3350  63 sm90    989.0
h200-141gb         4800  63 sm90    989.0
b200-180gb         8000  63 sm100  2250.0
gb10-128gb          273   0 sm121   125.0
jetsonorin-64gb     205   0 sm87     42.5
rx580-8gb           256  16 gfx803    6.2
rx6600-8gb          224  16 gfx1032  17.9
rx6700xt-12gb       384  32 gfx1031  26.4
rx6800-16gb         512  32 gfx1030  32.3
rx6800xt-16gb       512  32 gfx1030  41.5
rx6900xt-16gb       512  32 gfx1030  46.1
rx7600-8gb          288  16 gfx1102  43.0
rx7600xt-16gb       288  16 gfx1102  45.1
rx7700xt-12gb       432  32 gfx1101  70.3
rx7800xt-16gb       624  32 gfx1101  74.6
rx7900gre-16gb      576  32 gfx1100  91.9
rx7900xt-20gb       800  32 gfx1100 103.2
rx7900xtx-24gb      960  32 gfx1100 122.8
rx9060xt-16gb       320  63 gfx1200 102.6
rx9070-16gb         640  63 gfx1201 144.5
rx9070xt-16gb       640  63 gfx1201 194.6
r9700-32gb          640  63 gfx1201 191.4
radeonvii-16gb     1024  16 gfx906   26.9
radeonprovii-16gb  1024  32 gfx906   26.2
mi50-16gb          1024  32 gfx906   26.5
mi50-32gb          1024  32 gfx906   26.5
mi100-32gb         1229  32 gfx908  184.6
mi210-64gb         1638  32 gfx90a  181.0
mi300x-192gb       5300  63 gfx942 1307.0
mi325x-256gb       6000  63 gfx942 1307.0
mi355x-288gb       8000  63 gfx950 2500.0
strixhalo-64gb      256   0 gfx1151  59.4
strixhalo-96gb      256   0 gfx1151  59.4
strixhalo-128gb     256   0 gfx1151  59.4
m1max-64gb          400   0 metal    10.4
m2ultra-192gb       800   0 metal    27.2
m3max-128gb         400   0 metal    14.2
m3ultra-512gb       819   0 metal    28.2
m4pro-64gb          273   0 metal     9.2
m4max-128gb         546   0 metal    18.4
"""

CATALOGUE = tuple(
    Entry(name, float(bandwidth), float(link), arch, float(tera))
    for name, bandwidth, link, arch, tera in (row.split() for row in _ROWS.split("\n") if row)
)


def find_device(text: str) -> DeviceSpec:
    """Return the device that a name like `rtx3060-12gb`, `RTX 3090` or `mi50-32gb` stands for."""
    wanted = _plain(text)
    found = [entry for entry in CATALOGUE if wanted in (_plain(entry.name), _family(entry.name))]
    if len(found) == 1:
        return _spec(found[0])
    names = [entry.name for entry in found] or _similar(wanted)
    problem = "names several devices" if found else "is unknown"
    raise OptionError(
        f"--device {text} {problem}.",
        hint=f"Choose {', '.join(names)}, a size as 24GiB, cuda:0 or cpu.",
        param="device",
    )


def catalogue_devices() -> list[DeviceSpec]:
    """Return all devices of the catalogue, in its order."""
    return [_spec(entry) for entry in CATALOGUE]


def driver_bytes(entry: Entry) -> int:
    """Return the memory that a card's idle driver holds; 0 if unknown."""
    if not entry.arch.startswith("sm") or entry.link == 0:
        return 0
    capacity = entry.gibibytes * GIB
    checks = capacity // CHECK_SHARE if entry.name in CHECKED else 0
    return DRIVER_BYTES + capacity // DRIVER_SHARE + checks


def _spec(entry: Entry) -> DeviceSpec:
    capacity, kept = entry.gibibytes * GIB, driver_bytes(entry)
    kind: DeviceKind = "metal"
    if entry.arch.startswith("sm"):
        kind = "cuda"
    elif entry.arch.startswith("gfx"):
        kind = "hip"
    return DeviceSpec(
        name=entry.name,
        kind=kind,
        total_bytes=capacity,
        available_bytes=capacity - kept,
        driver_bytes=kept,
        bandwidth=entry.bandwidth * 1e9,
        link=entry.link * 1e9,
        flops=entry.tera * 1e12,
        sm=int(entry.arch[2:]) if kind == "cuda" else 0,
        gfx=entry.arch if kind == "hip" else "",
        unified=entry.link == 0,
    )


def _plain(text: str) -> str:
    """Return a name without the blanks, dashes and case in which spellings differ."""
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("nvidia", "").replace("geforce", ""))


def _family(name: str) -> str:
    return _plain(name.rsplit("-", 1)[0])


def _similar(wanted: str) -> list[str]:
    """Return names of the catalogue that are similar to a wrong name."""
    by_plain = {_plain(entry.name): entry.name for entry in CATALOGUE}
    close = difflib.get_close_matches(wanted, by_plain, n=4, cutoff=0.5)
    return [by_plain[name] for name in close] or ["rtx3060-12gb", "rtx4090-24gb", "rx7900xtx-24gb"]
