# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Asks huggingface_hub, in the interpreter of a virtual environment that has it.

The text of this file is the program of ``python -I -c``, so it imports nothing of ours. A line of JSON comes on
standard input, which stays open for as long as the module lives, and one goes out: what was asked for, or C(failure).
"""

from __future__ import annotations

import glob
import json
import os
import sys
import threading
import typing as t

Answer = dict[str, t.Any]


def list_files(request: Answer) -> Answer:
    """The commit of a revision, and name, size in bytes and hashes of its files that the patterns let through."""
    import huggingface_hub as hub  # noqa: PLC0415 - its absence is an answer

    api = hub.HfApi(token=request["token"] or False)
    info = api.model_info(
        request["repository"], revision=request["revision"], files_metadata=True, timeout=request["timeout"]
    )
    names = hub.utils.filter_repo_objects(
        [file.rfilename for file in info.siblings or []],
        allow_patterns=request["allow"] or None,
        ignore_patterns=request["ignore"] or None,
    )
    wanted = set(names)
    return {
        "revision": info.sha,
        "files": [
            {
                "name": file.rfilename,
                "size": file.size,
                "sha256": file.lfs.sha256 if file.lfs else None,
                "git": file.blob_id,
            }
            for file in info.siblings or []
            if file.rfilename in wanted
        ],
    }


def look(request: Answer) -> Answer:
    """See whether the hub would give the first of the named files: of a gated repository anybody may list them."""
    import huggingface_hub as hub  # noqa: PLC0415 - see list_files

    url = hub.hf_hub_url(request["repository"], request["names"][0], revision=request["revision"])
    hub.get_hf_file_metadata(url, token=request["token"] or False, timeout=request["timeout"])
    return {}


def fetch(request: Answer) -> Answer:
    """Fetch the named files of a commit into a directory."""
    import huggingface_hub as hub  # noqa: PLC0415 - see list_files

    hub.snapshot_download(
        request["repository"],
        revision=request["revision"],
        local_dir=request["directory"],
        allow_patterns=[glob.escape(name) for name in request["names"]],
        max_workers=request["workers"],
        etag_timeout=request["timeout"],
        token=request["token"] or False,
    )
    return {}


def failure(error: BaseException) -> Answer:
    """The kinds of an error and of its causes, by name because they differ with the client's age; status and errno."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    responses = [getattr(one, "response", None) for one in chain]
    numbers = [one for one in chain if isinstance(one, OSError) and one.errno]
    return {
        "kinds": [kind.__name__ for one in chain for kind in type(one).__mro__],
        "status": next((response.status_code for response in responses if response is not None), None),
        "errno": numbers[0].errno if numbers else None,
        "file": str(numbers[0].filename or "") if numbers else "",
        "text": " ".join(str(error).split()),
    }


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Answer the one request."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What the client prints is not the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = {"list": list_files, "look": look, "fetch": fetch}[request["do"]](request)
    except Exception as error:
        answer = {"failure": failure(error)}
    with os.fdopen(out, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
