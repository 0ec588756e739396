#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_info
short_description: Look at the RoCE links of a node and the path to its peers
description:
  - Finds the netdevs with an HCA behind them, whatever the kernel calls them, with their addresses, MTU, speed and
    carrier, and says what is wrong with them on this node.
  - Sends each peer a small packet and one as large as the MTU of the fabric interface, both with the DF bit. A link
    with unlike MTUs lets the small one pass and loses the other.
  - Fails only on malformed options. What is wrong with the node is in RV(problems), what the kernel does not tell is
    null. The filter P(sparks.hy3.fabric_problems#filter) judges the cluster from the results of all nodes.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
requirements:
  - The C(ip) command of iproute2 5.0 or newer.
  - The capability C(CAP_NET_RAW) (root has it) to send packets to O(peers). Without it the path is not tried, which is
    a warning.
options:
  address:
    description: IPv4 address of the node on the fabric, without a prefix length.
    type: str
  interface:
    description: The network interface of the fabric. If left out, the one that owns O(address).
    type: str
  hca:
    description:
      - Which HCAs are to be used, in the syntax of E(NCCL_IB_HCA), for example V(=rocep1s0f1).
      - If left out, those behind O(interface).
    type: str
  links:
    description:
      - The links of a ring without a switch, each cabled to another node.
      - The HCAs behind them are then the ones that are used, and O(address) may be on any interface.
    type: list
    elements: dict
    default: []
    suboptions:
      interface:
        description: The network interface of the link.
        type: str
        required: true
      address:
        description: IPv4 address of this node on the link, without a prefix length.
        type: str
        required: true
      peer:
        description: Name of the node at the other end, for people. It is not read.
        type: str
  peers:
    description:
      - Fabric addresses of other nodes to reach, each through the port in its subnet, or else through O(interface).
      - Needs O(address).
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
- name: Look at the fabric of this node and the path to its peer
  sparks.hy3.fabric_info:
    address: 192.168.100.1
    peers: [192.168.100.2]
  register: fabric

- name: Look at a node of a ring, where each link leads to another node
  sparks.hy3.fabric_info:
    address: 192.168.1.11
    links:
      - {interface: enp1s0f0np0, address: 192.168.12.1, peer: spark-2}
      - {interface: enp1s0f1np1, address: 192.168.31.1, peer: spark-3}
    peers: [192.168.12.2, 192.168.31.3, 192.168.1.12, 192.168.1.13]

- name: See which netdevs and HCAs a node has
  sparks.hy3.fabric_info:
"""

RETURN = r"""
address:
  description: The fabric address, as given.
  returned: success
  type: str
  sample: 192.168.100.1
interface:
  description: The interface of the fabric; null if there is none or it is not certain.
  returned: success
  type: str
  sample: enp1s0f1np1
mtu:
  description: MTU of RV(interface) in bytes; null if not known.
  returned: success
  type: int
  sample: 9000
selected:
  description: The HCA ports that would be used, which are those asked for that are Ethernet and ACTIVE.
  returned: success
  type: list
  elements: str
  sample: ["rocep1s0f1:1"]
netdevs:
  description: The netdevs with an HCA behind them or, such as VLANs, with a GID of their own.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the netdev.
      type: str
      sample: enp1s0f1np1
    mtu:
      description: Its MTU in bytes.
      type: int
      sample: 9000
    carrier:
      description: Whether there is a signal.
      type: bool
      sample: true
    parent:
      description: The netdev below a VLAN.
      type: str
      sample: null
    addresses:
      description: IPv4 addresses with their prefix length.
      type: list
      elements: str
      sample: [192.168.100.1/24]
    speed:
      description: Speed of the link in Gbit/s.
      type: float
      sample: 200.0
    hcas:
      description: Names of its HCAs.
      type: list
      elements: str
      sample: [rocep1s0f1]
    pci:
      description: Its PCI address.
      type: str
      sample: "0000:01:00.1"
    twin:
      description: The netdev that shares its cage, which is the same PCI function in another domain.
      type: str
      sample: enP2p1s0f1np1
hcas:
  description: All HCA ports.
  returned: success
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
    active:
      description: Whether its state is ACTIVE.
      type: bool
      sample: true
    link_layer:
      description: Its link layer. RoCE needs C(Ethernet).
      type: str
      sample: Ethernet
    speed:
      description: Its rate in Gbit/s.
      type: float
      sample: 200.0
    gids:
      description: Its usable GIDs, which are RoCE v2 with an IPv4 address.
      type: list
      elements: dict
      contains:
        index:
          description: GID index.
          type: int
          sample: 3
        address:
          description: The IPv4 address.
          type: str
          sample: 192.168.100.1
        netdev:
          description: The netdev of the row, empty if the kernel names none.
          type: str
          sample: enp1s0f1np1
    error:
      description: Why its GID table could not be read, or empty.
      type: str
      sample: ""
paths:
  description: What was tried to each of O(peers).
  returned: success
  type: list
  elements: dict
  contains:
    address:
      description: The peer.
      type: str
      sample: 192.168.100.2
    route:
      description: Where the kernel would send a packet to it, each part empty if it does not say.
      type: dict
      contains:
        interface:
          description: The interface.
          type: str
          sample: enp1s0f1np1
        source:
          description: The source address.
          type: str
          sample: 192.168.100.1
        gateway:
          description: The next hop.
          type: str
          sample: ""
    bytes:
      description: Size of the largest packet that was to be sent, in bytes.
      type: int
      sample: 9000
    small:
      description: Whether a small packet came back; null if it could not be sent or the route leads elsewhere.
      type: bool
      sample: true
    full:
      description: Whether one of RV(paths[].bytes) came back undivided; null if it was not sent.
      type: bool
      sample: true
    error:
      description: Why no packet could be sent, or empty.
      type: str
      sample: ""
problems:
  description: What keeps NCCL from using this node's fabric, one sentence each.
  returned: success
  type: list
  elements: str
  sample: []
notes:
  description: What works but is slow or not known, one sentence each.
  returned: success
  type: list
  elements: str
  sample: []
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._fabric import (
    LINK_COMMAND,
    node_findings,
    path_facts,
    read_node,
    way_to,
)
from ansible_collections.sparks.hy3.plugins.module_utils._path import ROUTE_COMMAND, Echo, Path, check_path, parse_route
from ansible_collections.sparks.hy3.plugins.module_utils._roce import RoceError, Sysfs, parse_address


def check_peers(module: AnsibleModule, ip: str, facts: dict[str, t.Any]) -> list[Path]:
    paths = []
    for peer in [str(parse_address(peer)) for peer in module.params["peers"]]:
        interface, address, mtu = way_to(peer, facts)
        if interface is None or address is None:
            continue
        # A peer without a route is an answer too.
        route = parse_route(module.run_command([ip, *ROUTE_COMMAND, peer])[1])
        paths.append(check_path(peer, route=route, interface=interface, mtu=mtu, echo=Echo(interface, address)))
    return paths


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str"},
            "interface": {"type": "str"},
            "hca": {"type": "str"},
            "links": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "interface": {"type": "str", "required": True},
                    "address": {"type": "str", "required": True},
                    "peer": {"type": "str"},
                },
            },
            "peers": {"type": "list", "elements": "str", "default": []},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    asked = {name: module.params[name] for name in ("address", "interface", "hca")}
    if module.params["peers"] and asked["address"] is None:
        module.fail_json(msg="peers is given without address: name the address of this node that is to reach them")
    ip = module.get_bin_path(LINK_COMMAND[0], required=True)
    links = module.run_command([ip, *LINK_COMMAND[1:]], check_rc=True)[1]
    try:
        sysfs = Sysfs(module.params["sysfs_root"])
        facts = read_node(**asked, sysfs=sysfs, links=links, ring=module.params["links"])
        paths = check_peers(module, ip, facts)
    except (Hy3Error, RoceError) as exc:
        module.fail_json(msg=str(exc))
    problems, notes = node_findings(facts, paths)
    facts |= {"paths": [path_facts(path) for path in paths], "problems": problems, "notes": notes}
    module.exit_json(changed=False, **facts)


if __name__ == "__main__":
    main()
