"""TierOptions: how much host memory and disk keep blocks that leave the device.

Owns the options and the HostTier that they make. Knows no model and opens no file: a loader
gives the bytes of a block, and of the file that holds one.

    kv_host_gib ──── / bytes of a block ──► HostTier.num_blocks
    kv_disk_gib ──── / bytes of a file ───► DiskTier.max_files
    kv_disk_path ─────────────────────────► the folder of those files

Always true: there are files only where there is host memory, since a block passes through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from forge.config import MAX_GEOMETRY, DiskTier, HostTier
from forge.errors import InvalidConfig

GIB = 2**30
LOAD_RULES = QUICKEST, ALWAYS = "quickest", "always"
MAX_TIER_GIB = 2**20
"""A pebibyte: more than any machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Options of the KV tiers below the device. Without `kv_host_gib` there are none.

    kv_host_gib     GiB of host memory for blocks that leave the device; 0: none
    kv_disk_path    folder for files of such blocks, which a later start reads again
    kv_disk_gib     most GiB of all files in that folder, those of other processes included
    kv_load_rule    quickest: an idle engine loads what it would take longer to compute, by times
                    that are measured at the start; always: it loads whatever it finds
    check_kv        compare a checksum of each block that comes back from host memory
    """

    kv_host_gib: float = 0.0
    kv_disk_path: str | None = None
    kv_disk_gib: float | None = None
    kv_load_rule: str = QUICKEST
    check_kv: bool = False

    def __post_init__(self) -> None:
        for name, value in (("kv_host_gib", self.kv_host_gib), ("kv_disk_gib", self.kv_disk_gib)):
            if value is not None and (
                type(value) not in (int, float) or not 0 <= value <= MAX_TIER_GIB
            ):
                raise InvalidConfig(
                    name,
                    f"{value!r} is not a number of GiB from 0 to {MAX_TIER_GIB}",
                    "Give 8, say, or leave it out",
                )
        path = self.kv_disk_path
        if path is not None and (type(path) is not str or not path):
            raise InvalidConfig("kv_disk_path", f"{path!r} names no folder", "Give its path")
        if path is None and self.kv_disk_gib is not None:
            raise InvalidConfig(
                "kv_disk_gib", "no folder is named for the files", "Give kv_disk_path too"
            )
        if path is not None and self.kv_disk_gib is None:
            raise InvalidConfig(
                "kv_disk_path", "its files have no limit in bytes", "Give kv_disk_gib too"
            )
        if path is not None and not self.kv_host_gib:
            raise InvalidConfig(
                "kv_disk_path",
                "files are read and written through host memory, and kv_host_gib is 0",
                "Give kv_host_gib too",
            )
        if self.kv_load_rule not in LOAD_RULES:
            raise InvalidConfig(
                "kv_load_rule",
                f"{str(self.kv_load_rule)[:64]!r} is not known",
                f"Give one of: {', '.join(LOAD_RULES)}",
            )
        if type(self.check_kv) is not bool:
            raise InvalidConfig("check_kv", f"{self.check_kv!r} is no boolean", "Give one")
        if self.check_kv and not self.kv_host_gib:
            raise InvalidConfig(
                "check_kv",
                "it compares what comes back from host memory, and kv_host_gib is 0",
                "Give kv_host_gib too",
            )

    @property
    def measures_costs(self) -> bool:
        """True where a start measures by what times an engine loads or computes."""
        return bool(self.kv_host_gib) and self.kv_load_rule == QUICKEST

    @property
    def max_disk_bytes(self) -> int:
        """Most bytes of all files in the folder; 0 without one."""
        return int((self.kv_disk_gib or 0) * GIB)

    @property
    def num_host_bytes(self) -> int:
        """Bytes of host memory for blocks."""
        return int(self.kv_host_gib * GIB)

    def check_prefix_caching(self, is_enabled: bool) -> None:
        """Raise InvalidConfig for host memory without prefix caching."""
        if self.kv_host_gib and not is_enabled:
            raise InvalidConfig(
                "kv_host_gib",
                "blocks in host memory are found by their prefix, and enable_prefix_caching is "
                "False",
                "Enable it, or leave kv_host_gib out",
            )

    def host_tier(
        self,
        block_bytes: int,
        file_bytes: int,
        *,
        enable_prefix_caching: bool,
    ) -> HostTier | None:
        """Return the tiers that fit into the given bytes, or None. Raises InvalidConfig.

        block_bytes   of a block in host memory
        file_bytes    of the file that holds a block
        """
        if not self.kv_host_gib:
            return None
        self.check_prefix_caching(enable_prefix_caching)
        num_blocks = self.num_host_bytes // block_bytes
        _check_count("kv_host_gib", num_blocks, MAX_GEOMETRY["num_blocks"], "block", block_bytes)
        disk = None
        if self.kv_disk_path is not None:
            max_files = self.max_disk_bytes // file_bytes
            _check_count("kv_disk_gib", max_files, 2**40, "file of a block", file_bytes)
            disk = DiskTier(max_files=max_files)
        return HostTier(num_blocks=num_blocks, disk=disk)


def _check_count(name: str, count: int, max_count: int, what: str, num_bytes: int) -> None:
    """Raise InvalidConfig unless the option has room for one, and for `max_count` at most."""
    if count < 1:
        raise InvalidConfig(
            name,
            f"it is less than one {what} of {num_bytes} bytes",
            f"Give {_format_gib(num_bytes, 2, ROUND_CEILING)} or more",
        )
    if count > max_count:
        raise InvalidConfig(
            name,
            f"{count} times a {what} of {num_bytes} bytes are more than {max_count}",
            f"Give {_format_gib(max_count * num_bytes, 6, ROUND_FLOOR)} or less",
        )


def _format_gib(num_bytes: int, num_digits: int, rounding: str) -> str:
    """Return so many bytes in GiB. Rounded to the nearest, the number could be refused, too."""
    context = Context(prec=num_digits, rounding=rounding)
    return f"{float(context.divide(Decimal(num_bytes), Decimal(GIB))):g}"
