# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which GID index, HCA and netdev this node must use for its fabric address.

The file is also a node-side program: a role copies it to the node, where ``roce.py --address A --output FILE`` runs
before each start of a unit. So it imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import re
import subprocess
import sys
import tempfile
import typing as t
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESS_COMMAND = ["ip", "-j", "-4", "addr", "show"]

# "IB/RoCE v1" is the kernel's word, "RoCE v1" that of some vendor kernels.
GID_TYPES = {"IB/RoCE v1": "v1", "RoCE v1": "v1", "RoCE v2": "v2"}
# What reading gid_attrs/types/N says of a slot that is empty or belongs to another network namespace.
EMPTY_SLOT_ERRNOS = frozenset({errno.EINVAL, errno.ENOENT, errno.ENODATA})
# The first NCCL that finds the GID of each HCA by itself when NCCL_IB_GID_INDEX is not set (its release notes).
NCCL_CHOOSES_GID = (2, 21)
# Which variable of a user gives the address.
ADDRESS_VARIABLE = "hy3_fabric_address (in a ring hy3_host_address)"


class RoceError(Exception):
    """Bad input or a bad node, said in one sentence: the value found, the rule it breaks, the way out."""


class NoCommonIndexError(RoceError):
    """Every HCA has a usable GID, and none is at the same index on all; ``sets`` lists the indexes of each."""

    def __init__(self, message: str, sets: str) -> None:
        super().__init__(message)
        self.sets = sets


@dataclass(frozen=True)
class Gid:
    """One row of a port's GID table; ``type`` is v1, v2 or unknown, ``ndev`` the netdev or empty."""

    index: int
    gid: ipaddress.IPv6Address
    type: str
    ndev: str

    @property
    def is_v4_mapped(self) -> bool:
        """Whether the GID lies in ::ffff:0:0/96; a tail that only looks like it does not count."""
        return self.gid.ipv4_mapped is not None

    @property
    def usable(self) -> bool:
        """Whether NCCL can use the row for RoCE v2 over IPv4."""
        return self.type == "v2" and self.is_v4_mapped


class Port(t.NamedTuple):
    """A port of an HCA; ``active`` is whether its state is ACTIVE, ``link_layer`` Ethernet, InfiniBand or unknown."""

    name: str
    number: int
    active: bool = True
    link_layer: str = "Ethernet"

    @property
    def label(self) -> str:
        return f"{self.name}:{self.number}"


@dataclass(frozen=True)
class Selector:
    """The meaning of an ``NCCL_IB_HCA`` value."""

    exclude: bool
    exact: bool
    entries: tuple[tuple[str, int | None], ...]

    def matches(self, entry: tuple[str, int | None], port: Port) -> bool:
        name, number = entry
        named = port.name == name if self.exact else port.name.startswith(name)
        return named and number in (None, port.number)


@dataclass(frozen=True)
class Resolution:
    """The answer for one node.

    ``index`` serves all HCAs, or is None where NCCL has to choose one for each; ``hca`` is an exact selector;
    ``tables`` and ``indexes`` have one entry per port that it selects.
    """

    index: int | None
    hca: str
    interface: str
    address: ipaddress.IPv4Address
    tables: dict[Port, list[Gid]]
    indexes: dict[Port, int]
    warnings: list[str]

    @property
    def env(self) -> dict[str, str]:
        return environment(index=self.index, hca=self.hca, interface=self.interface)


def is_number(name: str) -> bool:
    """Return whether a name in sysfs is the number of a slot or port."""
    return name.isascii() and name.isdecimal()


def is_active(state: str | None) -> bool:
    """Return whether a port's ``state`` reads ``4: ACTIVE``; a kernel that tells none is trusted."""
    return state is None or state.partition(":")[2].strip() == "ACTIVE"


def link_layer(text: str | None) -> str:
    """Return Ethernet, InfiniBand or unknown for a port's ``link_layer``; a kernel that tells none is trusted."""
    layer = "Ethernet" if text is None else text.strip()
    return layer if layer in ("Ethernet", "InfiniBand") else "unknown"


def gid_type(text: str) -> str:
    """Return v1, v2 or unknown for the text of a ``gid_attrs/types`` file."""
    return GID_TYPES.get(text.strip(" \t\r\n\0"), "unknown")


def parse_table(rows: Iterable[Mapping[str, t.Any]]) -> list[Gid]:
    """Return the filled rows in numeric order.

    A row has ``index`` (text or number), ``gid``, ``type`` (None if it could not be read) and, optionally, ``ndev``.
    Empty slots (zero GID or no type) and names that are no number are left out.
    """
    table = []
    for row in rows:
        index = str(row["index"])
        if row["type"] is None or not is_number(index):
            continue
        try:
            gid = ipaddress.IPv6Address(row["gid"].strip())
        except ValueError as exc:
            raise RoceError(
                f"GID {index} reads {row['gid']!r}, which is no IPv6 address: check hy3_sysfs_root"
            ) from exc
        if int(gid):
            ndev = (row.get("ndev") or "").strip()
            # Garbage is nobody's name, but not the absence of one, which would be trusted.
            table.append(Gid(int(index), gid, gid_type(row["type"]), ndev if ndev.isprintable() else "?"))
    return sorted(table, key=lambda row: row.index)


def parse_address(text: str) -> ipaddress.IPv4Address:
    """Return the fabric address, or raise if it is not one plain IPv4 address."""
    try:
        return ipaddress.IPv4Address(text.strip())
    except ValueError as exc:
        raise RoceError(
            f"The fabric address {text!r} is no IPv4 address: set {ADDRESS_VARIABLE} to one without a prefix length, "
            "such as 192.168.100.1"
        ) from exc


def parse_selector(text: str) -> Selector:
    """Read NCCL's syntax: ``[^][=]name[:port][,...]``, where a name is a prefix unless the list starts with ``=``."""
    rest = text.strip()
    exclude, rest = rest.startswith("^"), rest.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    entries: list[tuple[str, int | None]] = []
    for entry in rest.split(","):
        match = re.fullmatch(r"([\w.-]+)(?::([0-9]{1,9}))?", entry.strip(), re.ASCII)
        if match is None:
            raise RoceError(
                f"HCA selector {text!r} has the entry {entry!r}: write hy3_hca as [^][=]NAME[:PORT][,...], as NCCL does"
            )
        entries.append((match[1], int(match[2], 10) if match[2] else None))
    return Selector(exclude, exact, tuple(entries))


def select_ports(selector: Selector, ports: Sequence[Port]) -> list[Port]:
    """Return the ports a selector means; an entry that means none is an error, for NCCL would just go on without it."""
    for entry in selector.entries:
        if not selector.exclude and not any(selector.matches(entry, port) for port in ports):
            wanted = entry[0] if entry[1] is None else f"{entry[0]}:{entry[1]}"
            raise RoceError(
                f"No HCA of this node matches {wanted}: it has {_listed(port.label for port in ports)}, so correct "
                "hy3_hca or leave it out"
            )
    return [
        port for port in ports if any(selector.matches(entry, port) for entry in selector.entries) != selector.exclude
    ]


def selected_ports(text: str, ports: Sequence[Port]) -> list[Port]:
    """Return the ports that an ``NCCL_IB_HCA`` value means, at least one."""
    chosen = select_ports(parse_selector(text), ports)
    if not chosen:
        raise RoceError(
            f"HCA selector {text!r} excludes every HCA of this node: it has {_listed(port.label for port in ports)}, "
            "so correct hy3_hca or leave it out"
        )
    return chosen


def exact_selector(chosen: Sequence[Port], ports: Sequence[Port]) -> str:
    """Write the ports as ``=name[,name]``; a port number only where a device has ports that are not chosen."""
    entries = []
    for port in chosen:
        whole = all(other in chosen for other in ports if other.name == port.name)
        entries.append(port.name if whole else port.label)
    return "=" + ",".join(dict.fromkeys(entries))


def port_warnings(port: Port, table: Iterable[Gid]) -> list[str]:
    """Return what is odd about one port's table."""
    unknown = [row.index for row in table if row.type == "unknown"]
    return [f"{port.label} has GIDs of an unknown type at {_listed(unknown)}; they are not used"] if unknown else []


def own_rows(table: Iterable[Gid], address: ipaddress.IPv4Address, interface: str) -> list[Gid]:
    """Return the usable rows of an address that name the interface, or else those that name no netdev.

    A VLAN child and its parent may have one address, and the other's row would send through the wrong one. Some kernels
    name none. An empty interface stands for any.
    """
    rows = [row for row in table if row.usable and row.gid.ipv4_mapped == address]
    if not interface:
        return rows
    return [row for row in rows if row.ndev == interface] or [row for row in rows if not row.ndev]


def _is_stacked(netdev: str, behind: Collection[str]) -> bool:
    """Whether a netdev is a VLAN or the like on a port: by the port's own netdevs or, if none is known, by its name."""
    return bool(netdev) and (netdev not in behind if behind else re.search(r"\.[0-9]+$", netdev) is not None)


def fabric_rows(
    tables: Mapping[str, Sequence[Gid]],
    address: ipaddress.IPv4Address,
    interface: str,
    behind: Mapping[str, Collection[str]],
) -> dict[str, list[Gid]]:
    """Return the usable rows of each HCA that may lead to a peer.

    An address that a port gave itself (169.254/16) leads there only if the fabric address is one, and that of a VLAN
    only if the fabric's netdev is one. See :func:`choose_index` for the arguments.
    """
    own = [(row.ndev, label) for label, table in tables.items() for row in own_rows(table, address, interface)]
    stacked = any(_is_stacked(netdev, behind.get(label, ())) for netdev, label in own)
    return {
        label: [
            row
            for row in table
            if row.usable
            and (address.is_link_local or not ipaddress.IPv4Address(row.gid.packed[12:]).is_link_local)
            and (stacked or not _is_stacked(row.ndev, behind.get(label, ())))
        ]
        for label, table in tables.items()
    }


def choose_index(
    tables: Mapping[str, Sequence[Gid]],
    address: ipaddress.IPv4Address,
    interface: str,
    behind: Mapping[str, Collection[str]] | None = None,
) -> tuple[int, list[str]]:
    """Return the one GID index that serves all HCAs of a rank, and warnings.

    Args:
        tables: The GID table of each selected port, by label.
        address: The fabric address; one of the tables must have a usable row for it.
        interface: The netdev that owns the address; the row of a VLAN parent or child is not taken for its own. Empty
            if not known.
        behind: The netdevs of each port, by label, where they are known.

    Raises:
        RoceError: No row carries the address, or several netdevs have one and none is named, or an HCA has no usable
            row.
        NoCommonIndexError: The HCAs have no usable index in common.
    """
    own = [row for table in tables.values() for row in own_rows(table, address, interface)]
    if not own:
        candidates = [
            f"{row.index} ({_described(row, address)})" for table in tables.values() for row in table if row.usable
        ]
        raise RoceError(
            f"No RoCE v2 GID for {address} on {_listed(tables)}: usable are {_listed(candidates)}, "
            "so correct hy3_fabric_address or hy3_hca"
        )
    netdevs = sorted({row.ndev for row in own if row.ndev})
    if len(netdevs) > 1:
        raise RoceError(f"{address} has RoCE v2 GIDs of {_listed(netdevs)}: name one of them in hy3_fabric_interface")
    usable = fabric_rows(tables, address, interface, behind or {})
    common = set.intersection(*({row.index for row in rows} for rows in usable.values()))
    if not common:
        sets = "; ".join(f"{label} has {_listed(row.index for row in rows)}" for label, rows in usable.items())
        message = (
            f"The HCAs have no usable GID index in common ({sets}), and NCCL takes one for all: "
            "give each an IPv4 address or select fewer with hy3_hca"
        )
        raise NoCommonIndexError(message, sets) if all(usable.values()) else RoceError(message)
    fitting = sorted({row.index for row in own} & common)
    if not fitting:
        index = min(common)
        return index, [f"GID index {index} is common to all HCAs but does not carry {address}"]
    if len(fitting) > 1:
        return fitting[0], [f"{address} stands at the GID indexes {_listed(fitting)}; the lowest is taken"]
    return fitting[0], []


def ring_notes(tables: Mapping[str, Sequence[Gid]], nccl_version: str | None) -> list[str]:
    """Return what NCCL does about the GID index in a ring, where no index is good for every link.

    Args:
        tables: The GID table of each selected port, by label.
        nccl_version: That of the NCCL that will run.

    Raises:
        RoceError: A port has no usable row, or this NCCL needs an index.
    """
    bare = [label for label, table in tables.items() if not any(row.usable for row in table)]
    if bare:
        raise RoceError(
            f"No RoCE v2 GID with an IPv4 address on {_listed(bare)}: give each link of the ring an address"
        )
    if not nccl_chooses(nccl_version):
        raise RoceError(
            f"In a ring NCCL chooses a GID index for each link, which 2.21 or newer does, and this one is "
            f"{nccl_version or 'of an unknown version'}: install a newer one in the venv, or use a switch"
        )
    return [f"NCCL {nccl_version} chooses an index for each link of the ring"]


def nccl_chooses(version: str | None) -> bool:
    """Return whether an NCCL of this version (``2.28.9``; None if not known) finds GIDs without being told."""
    if version is None:
        return False
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", version.strip(), re.ASCII)
    if match is None:
        raise RoceError(f"NCCL version {version!r} is none: write it as 2.28.9, or leave it out")
    return (int(match[1]), int(match[2])) >= NCCL_CHOOSES_GID


def nccl_of(venv: str) -> str | None:
    """Return the version of the NCCL that pip installed in a virtual environment, None if there is none."""
    found = sorted(Path(venv).glob("lib*/python3*/site-packages/nvidia_nccl_cu*-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def netdev_name(value: str) -> str:
    """Return a netdev's name, or raise ValueError for what can be none (and no part of a path)."""
    if not value or "/" in value or not value.isprintable():
        raise ValueError(value)
    return value


def parse_owners(addresses: str) -> list[tuple[str, str]]:
    """Return (netdev, address) pairs from the output of ``ip -j -4 addr show``."""
    try:
        return [
            (netdev_name(link["ifname"]), str(info["local"]))
            for link in json.loads(addresses)
            for info in link.get("addr_info", [])
            if "local" in info
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise RoceError(
            f"'{' '.join(ADDRESS_COMMAND)}' printed no list of links: install iproute2 5.0 or newer"
        ) from exc


def choose_address(addresses: str, interface: str) -> ipaddress.IPv4Address:
    """Return the one IPv4 address of an interface; one that the system gave itself (169.254/16) yields to any other.

    Args:
        addresses: Output of ``ip -j -4 addr show``.
        interface: The netdev.

    Raises:
        RoceError: It has no address, or several.
    """
    owned = parse_owners(addresses)
    found = [parse_address(local) for name, local in owned if name == interface]
    if not found:
        raise RoceError(
            f"This node has no interface {interface!r} with an IPv4 address: it has "
            f"{_listed(f'{local} on {name}' for name, local in owned)}, so correct hy3_fabric_interface or configure it"
        )
    fixed = [address for address in found if not address.is_link_local] or found
    if len(fixed) > 1:
        raise RoceError(f"{interface} owns {_listed(fixed)}: set hy3_fabric_address to one of them")
    return fixed[0]


def choose_interface(
    address: ipaddress.IPv4Address,
    addresses: str,
    wanted: str | None,
    has_gid: Callable[[str], bool] = lambda netdev: False,
) -> str:
    """Return the netdev that owns the address.

    Args:
        address: The fabric address.
        addresses: Output of ``ip -j -4 addr show``.
        wanted: The netdev that the user named, or None.
        has_gid: Whether a netdev has a GID of that address; asked where several own it.

    Raises:
        RoceError: No netdev owns the address, several do and none was named, or the named one does not.
    """
    owned = parse_owners(addresses)
    owners = [name for name, local in owned if local == str(address)]
    if not owners:
        raise RoceError(
            f"No interface of this node owns {address}: it has "
            f"{_listed(f'{local} on {name}' for name, local in owned)}, so correct {ADDRESS_VARIABLE} or configure it"
        )
    if wanted is None:
        fitting = owners if len(owners) == 1 else [name for name in owners if has_gid(name)]
        if len(fitting) != 1:
            raise RoceError(f"{address} is owned by {_listed(owners)}: name one of them in hy3_fabric_interface")
        return fitting[0]
    if wanted not in owners:
        raise RoceError(
            f"{address} is owned by {_listed(owners)}, not by {wanted}: correct hy3_fabric_interface or leave it out"
        )
    return wanted


def environment(*, index: int | str | None, hca: str, interface: str) -> dict[str, str]:
    """Return the variables for NCCL and Gloo; without an index its key is absent, so that NCCL chooses.

    NCCL matches interfaces by prefix too, hence the exact form, which keeps ``eth0`` from meaning ``eth0.40`` as well.
    Gloo takes the plain name.
    """
    text = index_text(index)
    return {
        **({} if text is None else {"NCCL_IB_GID_INDEX": text}),
        "NCCL_IB_HCA": hca,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "0",
    }


def index_text(value: int | str | None) -> str | None:
    """Return a GID index as NCCL cannot misread it: NCCL takes ``auto`` for 0 and ``010`` for 8 without a word."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    if not re.fullmatch(r"0|[1-9][0-9]*", text):
        raise RoceError(f"GID index {text!r} is no decimal number without leading zeros: correct it or leave it out")
    return text


def render_env_file(env: Mapping[str, str]) -> str:
    """Return the text of a systemd ``EnvironmentFile``: one ``KEY=value`` a line, nothing that needs quoting."""
    for key, value in env.items():
        if not re.fullmatch(r"[\w.:,=^@-]+", value, re.ASCII):
            raise RoceError(f"{key} would be {value!r}: a value must be non-empty and free of spaces and quotes")
    return "".join(f"{key}={value}\n" for key, value in env.items())


class Sysfs:
    """What the kernel tells about HCAs below one root (``/sys``)."""

    def __init__(self, root: str) -> None:
        self.net = Path(root, "class", "net")
        self.infiniband = Path(root, "class", "infiniband")

    def ports(self) -> list[Port]:
        """Return every port of every HCA, by name and number."""
        found = []
        for path in self.infiniband.glob("*/ports/*"):
            if is_number(path.name):
                layer = link_layer(_read(path / "link_layer"))
                found.append(Port(path.parent.parent.name, int(path.name), is_active(_read(path / "state")), layer))
        if not found:
            raise RoceError(f"{self.infiniband} has no HCA: load the RDMA driver (mlx5_ib) or correct hy3_sysfs_root")
        return sorted(found)

    def slots(self, port: Port) -> list[str]:
        """Return the names of a port's GID slots, the empty ones included."""
        try:
            return os.listdir(self.infiniband / port.name / "ports" / str(port.number) / "gids")
        except OSError as exc:
            raise RoceError(f"{port.label} has no GID table ({exc.strerror}): name a RoCE port in hy3_hca") from exc

    def table(self, port: Port) -> list[Gid]:
        """Return the filled rows of a port's GID table."""
        base = self.infiniband / port.name / "ports" / str(port.number)
        return parse_table(
            {
                "index": name,
                "gid": _read(base / "gids" / name) or "::",
                "type": _read(base / "gid_attrs" / "types" / name),
                "ndev": _read(base / "gid_attrs" / "ndevs" / name),
            }
            for name in self.slots(port)
        )

    def readable_table(self, port: Port) -> list[Gid]:
        """Return a port's table, empty if it cannot be read: what asks every port must not fail for a stranger's."""
        try:
            return self.table(port)
        except RoceError:
            return []

    def behind(self, port: Port) -> set[str]:
        """Return the netdevs of an HCA and the bonds that these are in; none where the kernel does not tell."""
        found = [path.parents[2] for path in self.net.glob(f"*/device/infiniband/{port.name}")]
        bonds = [(path / "master").resolve().name for path in found if (path / "master" / "bonding").exists()]
        return {*(path.name for path in found), *bonds}

    def has_gid(self, interface: str, address: ipaddress.IPv4Address) -> bool:
        """Return whether a usable GID of the address names the netdev."""
        tables = (self.readable_table(port) for port in self.ports() if port.link_layer == "Ethernet")
        return any(row.ndev == interface for table in tables for row in own_rows(table, address, interface))

    def ports_of(self, interface: str, ports: Sequence[Port]) -> list[Port]:
        """Return the ports behind a netdev: its own device's, else (VLAN, bond) those with a GID row of it."""
        devices = {path.name for path in (self.net / interface / "device" / "infiniband").glob("*")}
        found = [port for port in ports if port.name in devices]
        if len(found) == 1:
            return found
        with_row = [port for port in found or ports if any(row.ndev == interface for row in self.readable_table(port))]
        if with_row or found:
            return with_row or found
        if (self.net / interface / "device").exists():
            raise RoceError(
                f"No RDMA device behind {interface}: set {ADDRESS_VARIABLE} to that of a RoCE port, or name its HCA in "
                "hy3_hca"
            )
        raise RoceError(
            f"{interface} has no parent device and no GID row: use a member port, or name its HCA in hy3_hca"
        )


def usable_ports(selected: Sequence[Port]) -> tuple[list[Port], list[str]]:
    """Return the ports that are Ethernet and ACTIVE, and a warning for each of the others; none is an error."""
    ethernet = [port for port in selected if port.link_layer == "Ethernet"]
    if not ethernet:
        layers = _listed(f"{port.label}: {port.link_layer}" for port in selected)
        raise RoceError(
            f"No selected HCA port has the link layer Ethernet ({layers}), which RoCE needs: "
            "select another with hy3_hca or set its LINK_TYPE to ETH with mlxconfig"
        )
    active = [port for port in ethernet if port.active]
    if not active:
        raise RoceError(
            f"No selected HCA port is ACTIVE ({_listed(port.label for port in ethernet)}): "
            "check the cable and, if it is set, hy3_hca"
        )
    warnings = [
        f"{port.label} has the link layer {port.link_layer} and is left out"
        for port in selected
        if port not in ethernet
    ]
    return active, warnings + [f"{port.label} is not ACTIVE and is left out" for port in ethernet if port not in active]


def resolve(
    *,
    address: str | None,
    hca: str | None,
    interface: str | None,
    sysfs: Sysfs,
    list_addresses: Callable[[], str],
    nccl_version: str | None = None,
    links: Sequence[str] = (),
) -> Resolution:
    """Find netdev, HCA ports and GID index for a fabric address.

    Args:
        address: The node's IPv4 address on the fabric, or None for that of the interface. In a ring, the one that every
            node reaches, wherever it is.
        hca: An ``NCCL_IB_HCA`` selector, or None for the HCA behind the netdev, or those behind the links.
        interface: The netdev, or None for the one that owns the address.
        sysfs: The kernel's view.
        list_addresses: Returns the output of ``ip -j -4 addr show``.
        nccl_version: That of the NCCL that will use the answer. With 2.21 or newer, HCAs without a common index are
            left to it; otherwise they are refused.
        links: The netdevs of a ring, each cabled to another node; empty where one address reaches every node.

    Raises:
        RoceError: This node cannot serve on that address.
    """
    addresses = list_addresses()
    if address is None and interface is None:
        raise RoceError("Neither an address nor an interface is given: name one of them")
    wanted = choose_address(addresses, interface or "") if address is None else parse_address(address)
    netdev = choose_interface(wanted, addresses, interface, lambda name: sysfs.has_gid(name, wanted))
    ports = sysfs.ports()
    if hca is None:
        selected = list(dict.fromkeys(port for name in links or [netdev] for port in sysfs.ports_of(name, ports)))
    else:
        selected = selected_ports(hca, ports)
    active, warnings = usable_ports(selected)
    tables = {port: sysfs.table(port) for port in active}
    by_label = {port.label: table for port, table in tables.items()}
    if links:
        notes = ring_notes(by_label, nccl_version)
        indexes = {port: min(row.index for row in table if row.usable) for port, table in tables.items()}
        return Resolution(None, exact_selector(active, ports), netdev, wanted, tables, indexes, warnings + notes)
    if wanted.is_link_local:
        warnings.append(f"{wanted} is a link-local address and may change: give the fabric a static one")
    for port, table in tables.items():
        warnings += port_warnings(port, table)
    index: int | None = None
    behind = {port.label: sysfs.behind(port) for port in active}
    try:
        index, notes = choose_index(by_label, wanted, netdev, behind)
    except NoCommonIndexError as exc:
        if not nccl_chooses(nccl_version):
            raise
        notes = [f"NCCL {nccl_version} chooses an index for each HCA, for there is no common one ({exc.sets})"]
    usable = fabric_rows(by_label, wanted, netdev, behind)
    indexes = {
        port: min(row.index for row in own_rows(table, wanted, netdev) or usable[port.label])
        if index is None
        else index
        for port, table in tables.items()
    }
    return Resolution(index, exact_selector(active, ports), netdev, wanted, tables, indexes, warnings + notes)


def write_atomically(path: Path, text: str) -> None:
    """Write a file of mode 0644 that is either whole or absent."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def main(arguments: Sequence[str]) -> int:
    """Write the environment file of this start, or leave none and return 1."""
    parser = argparse.ArgumentParser(description="Resolve the RoCE environment of this node for NCCL and Gloo.")
    parser.add_argument("--address", help="IPv4 address of this node on the fabric (default: that of the interface)")
    parser.add_argument("--hca", help="NCCL_IB_HCA selector (default: the HCA behind the interface)")
    parser.add_argument("--interface", help="netdev (default: the one that owns the address)")
    parser.add_argument("--sysfs-root", default="/sys")
    parser.add_argument("--nccl-version", help="from 2.21 on, HCAs without a common GID index are left to NCCL")
    parser.add_argument("--venv", help="virtual environment that has this NCCL, where no version is given")
    parser.add_argument("--link", action="append", default=[], help="netdev of a ring, once for each")
    parser.add_argument("--output", required=True, type=Path, help="EnvironmentFile to write")
    options = parser.parse_args(arguments)
    try:
        # A stale answer must not outlive a failure: the index drifts while the node is up.
        options.output.unlink(missing_ok=True)
        found = resolve(
            address=options.address,
            hca=options.hca,
            interface=options.interface,
            sysfs=Sysfs(options.sysfs_root),
            list_addresses=_run_ip,
            nccl_version=options.nccl_version or (nccl_of(options.venv) if options.venv else None),
            links=options.link,
        )
        write_atomically(options.output, render_env_file(found.env))
    except RoceError as exc:
        print(exc, file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"Cannot write {options.output}: {exc.strerror}", file=sys.stderr)
        return 1
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    index = "No GID index" if found.index is None else f"GID index {found.index}"
    print(f"{index} on {found.hca} ({found.interface}) for {found.address}")
    return 0


def _run_ip() -> str:
    try:
        done = subprocess.run(ADDRESS_COMMAND, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except FileNotFoundError as exc:
        raise RoceError("The command 'ip' is missing on this node: install iproute2") from exc
    if done.returncode:
        raise RoceError(f"'{' '.join(ADDRESS_COMMAND)}' failed: {done.stderr.strip()}")
    return done.stdout


def _read(path: Path) -> str | None:
    """Return the text of a sysfs file, or None for an empty slot."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as exc:
        if exc.errno in EMPTY_SLOT_ERRNOS:
            return None
        raise RoceError(f"Cannot read {path}: {exc.strerror}") from exc


def _described(row: Gid, wanted: ipaddress.IPv4Address) -> str:
    owner = f" of {row.ndev}" if row.gid.ipv4_mapped == wanted else ""
    return f"{row.gid.ipv4_mapped}{owner}"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items) or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
