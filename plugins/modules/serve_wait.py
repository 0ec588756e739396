#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_wait
short_description: Wait for an engine to serve, and say what it does meanwhile
version_added: 0.1.0
description:
  - Waits until the API of an engine that systemd has started is healthy and lists its model.
  - Prints a line whenever the phase of the start or the number of loaded shards changes, and at least every ten
    seconds.
  - Fails as soon as the log shows that the engine cannot come up, or when its unit fails, stops or is restarted,
    with the cause and what to do; otherwise at the timeout, with the phase and the last log lines.
  - Runs on the controller and reads the node with M(sparks.hy3.engine_status).
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Does not wait.
  diff_mode:
    support: N/A
    details: The action changes nothing.
  idempotent:
    support: full
    details: The action changes nothing.
options:
  unit:
    description: Name of the engine's systemd unit, with its suffix.
    type: str
    required: true
  log_unit:
    description: The unit whose log tells the progress, if it is not O(unit).
    type: str
  url:
    description: Base URL of the API as the node reaches it, for example V(http://127.0.0.1:8000).
    type: str
    required: true
  model:
    description: Name that the API must list. Any will do if it is left out.
    type: str
  api_key:
    description: Key of the API, if it has one.
    type: str
  timeout:
    description: Seconds to wait. A first start of Hy3 on two Sparks takes 7 to 15 minutes.
    type: int
    default: 1800
  interval:
    description: Seconds between two looks at the node.
    type: float
    default: 2
"""

EXAMPLES = r"""
---
- name: Wait for the engine
  sparks.hy3.serve_wait:
    unit: hy3-serve.service
    url: http://127.0.0.1:8000
    model: hy3-nvfp4
  register: boot
"""

RETURN = r"""
elapsed_s:
  description: Seconds waited.
  returned: always
  type: float
  sample: 512.4
phases:
  description: The phases that were seen, with the seconds after which each was first seen.
  returned: always
  type: list
  elements: dict
  sample: [{phase: loading, at_s: 31.0}, {phase: ready, at_s: 512.4}]
log:
  description: What the engine's log says, as RV(sparks.hy3.engine_status#module:log); null in check mode.
  returned: always
  type: dict
failure:
  description: Why the engine does not come up, as RV(sparks.hy3.engine_status#module:failure), or null.
  returned: always
  type: dict
ended:
  description: Whether the engine never comes up, because its log says so or its unit has ended. False at the timeout.
  returned: always
  type: bool
  sample: false
"""
