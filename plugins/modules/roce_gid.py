#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: roce_gid
short_description: Resolve the RoCE GID index, HCA and interface of a node
description:
  - Finds, from the kernel of this node, which interface owns the fabric address, which HCA is behind it and which row
    of its GID table is the RoCE v2 row of that address, and returns the environment that NCCL and Gloo need.
  - GID tables are per node and change while it is up, so resolve on every node and never pass one node's index to
    another.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
requirements:
  - The C(ip) command of iproute2.
options:
  address:
    description:
      - IPv4 address of the node on the fabric, without a prefix length.
      - If left out, the one address of O(interface); an address in 169.254.0.0/16 is taken only if there is no other.
    type: str
  hca:
    description:
      - Which HCAs to use, in the syntax of E(NCCL_IB_HCA), for example V(=rocep1s0f1) or V(=rocep1s0f1,roceP2p1s0f1).
      - A name is a prefix unless the list starts with V(=); V(^) excludes; V(:1) after a name selects a port.
      - If left out, the HCA behind O(interface) is used.
    type: str
  interface:
    description:
      - The network interface that owns O(address). Needed only if several do.
      - Where a VLAN and its parent have one address, only the GID of this interface is taken.
    type: str
  nccl_version:
    description:
      - Version of the NCCL that will use the answer, for example V(2.28.9).
      - With 2.21 or newer, HCAs that have no GID index in common leave RV(gid_index) empty, and NCCL chooses one for
        each. Older, or left out, they are refused.
    type: str
  venv:
    description: Virtual environment that has this NCCL, where no O(nccl_version) is given.
    type: path
  links:
    description:
      - The network interfaces of a ring without a switch, each cabled to another node. RV(gid_index) is then null, for
        no index is good for every link, and NCCL has to be 2.21 or newer.
      - O(address) is then the one that every node reaches, whatever interface it is on.
    type: list
    elements: str
    default: []
  sysfs_root:
    description: Where the kernel's device tree is mounted.
    type: path
    default: /sys
"""

EXAMPLES = r"""
---
- name: Resolve the fabric of this node
  sparks.hy3.roce_gid:
    address: 192.168.100.1
  register: fabric

- name: Use both HCAs of one cage, each with its own index if NCCL can
  sparks.hy3.roce_gid:
    interface: enp1s0f1np1
    hca: "=rocep1s0f1,roceP2p1s0f1"
    nccl_version: 2.28.9
"""

RETURN = r"""
gid_index:
  description:
    - The GID index that serves all selected HCAs.
    - Null if they have none in common and NCCL chooses; E(NCCL_IB_GID_INDEX) is then absent from RV(env) and must
      not be set.
  returned: success
  type: int
  sample: 3
address:
  description: The fabric address, as given or taken from O(interface).
  returned: success
  type: str
  sample: 192.168.100.1
hca:
  description: The selected HCAs as an exact E(NCCL_IB_HCA) selector.
  returned: success
  type: str
  sample: =rocep1s0f1
interface:
  description: The network interface that owns O(address).
  returned: success
  type: str
  sample: enp1s0f1np1
env:
  description: The environment variables for NCCL and Gloo on this node.
  returned: success
  type: dict
  sample:
    NCCL_IB_GID_INDEX: "3"
    NCCL_IB_HCA: =rocep1s0f1
    NCCL_SOCKET_IFNAME: =enp1s0f1np1
    GLOO_SOCKET_IFNAME: enp1s0f1np1
    NCCL_IB_DISABLE: "0"
hcas:
  description: The selected HCA ports and their GID tables; where the module refuses, every port with a table.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name of the HCA.
      type: str
      sample: rocep1s0f1
    port:
      description: Port number.
      type: int
      sample: 1
    netdev:
      description: The interface of the row at RV(hcas[].index), empty if the kernel names none.
      type: str
      sample: enp1s0f1np1
    index:
      description: The GID index used on this port, the same as RV(gid_index) unless that is null. Null on a refusal.
      type: int
      sample: 3
    usable:
      description: The indexes of the RoCE v2 rows with an IPv4 address.
      type: list
      elements: int
      sample: [3, 5]
    skipped:
      description: The empty slots below the last filled row.
      type: list
      elements: int
      sample: [2]
    table:
      description: The filled rows of the GID table.
      type: list
      elements: dict
      contains:
        index:
          description: GID index.
          type: int
          sample: 3
        gid:
          description: The GID as an IPv6 address, in the form of sysfs.
          type: str
          sample: 0000:0000:0000:0000:0000:ffff:c0a8:6401
        type:
          description: RoCE version of the row.
          type: str
          choices: [v1, v2, unknown]
          sample: v2
        ndev:
          description: The interface of the row, empty if the kernel names none.
          type: str
          sample: enp1s0f1np1
    warnings:
      description: What is odd about the table, such as rows of an unknown type.
      type: list
      elements: str
      sample: []
warnings:
  description: What is accepted but worth a look, such as a link-local address.
  returned: when there are any
  type: list
  elements: str
  sample: []
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    ADDRESS_COMMAND,
    Gid,
    Port,
    Resolution,
    RoceError,
    Sysfs,
    is_number,
    nccl_of,
    port_warnings,
    resolve,
)


def describe_row(row: Gid) -> dict[str, t.Any]:
    # As the kernel spells it; Python 3.13 would write the end of a mapped address as an IPv4 address.
    return {"index": row.index, "gid": row.gid.packed.hex(":", 2), "type": row.type, "ndev": row.ndev}


def describe_port(port: Port, table: list[Gid], index: int | None, slots: list[str]) -> dict[str, t.Any]:
    filled = {row.index for row in table}
    return {
        "name": port.name,
        "port": port.number,
        "netdev": next((row.ndev for row in table if row.index == index), ""),
        "index": index,
        "usable": [row.index for row in table if row.usable],
        "skipped": sorted(
            {int(slot) for slot in slots if is_number(slot) and int(slot) < max(filled, default=0)} - filled
        ),
        "table": [describe_row(row) for row in table],
        "warnings": port_warnings(port, table),
    }


def describe_all(sysfs: Sysfs) -> list[dict[str, t.Any]]:
    """What a person needs to see where nothing could be resolved."""
    try:
        tables = {port: sysfs.readable_table(port) for port in sysfs.ports()}
    except RoceError:
        return []
    return [describe_port(port, table, None, sysfs.slots(port)) for port, table in tables.items() if table]


def describe(found: Resolution, sysfs: Sysfs) -> dict[str, t.Any]:
    return {
        "gid_index": found.index,
        "address": str(found.address),
        "hca": found.hca,
        "interface": found.interface,
        "env": found.env,
        "hcas": [
            describe_port(port, table, found.indexes[port], sysfs.slots(port)) for port, table in found.tables.items()
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str"},
            "hca": {"type": "str"},
            "interface": {"type": "str"},
            "nccl_version": {"type": "str"},
            "venv": {"type": "path"},
            "links": {"type": "list", "elements": "str", "default": []},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        required_one_of=[("address", "interface")],
        supports_check_mode=True,
    )

    def list_addresses() -> str:
        command = [module.get_bin_path(ADDRESS_COMMAND[0], required=True), *ADDRESS_COMMAND[1:]]
        return module.run_command(command, check_rc=True)[1]

    venv = module.params["venv"]
    sysfs = Sysfs(module.params["sysfs_root"])
    try:
        found = resolve(
            address=module.params["address"],
            hca=module.params["hca"],
            interface=module.params["interface"],
            sysfs=sysfs,
            list_addresses=list_addresses,
            nccl_version=module.params["nccl_version"] or (nccl_of(venv) if venv else None),
            links=module.params["links"],
        )
    except RoceError as exc:
        module.fail_json(msg=str(exc), hcas=describe_all(sysfs))
    for warning in found.warnings:
        module.warn(warning)
    module.exit_json(changed=False, **describe(found, sysfs))


if __name__ == "__main__":
    main()
