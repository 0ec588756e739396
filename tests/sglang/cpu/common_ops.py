# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: PLR0917  SGLang passes everything by position
"""Stand-ins for the CPU operators of sgl-kernel, which is released for CUDA only. Not SGLang's code: a test's.

The package sgl_kernel imports a module of this name when its own library cannot be loaded. The first operator is
all that plain serving calls; the others are for drafts (EAGLE) that form a chain, with greedy sampling. Whatever else
an operator could be asked for ends in an error. Models, loaders, scheduler, API and the rest are SGLang's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def operator(arguments: str, result: str = "()") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under its own name; ``arguments`` in the language of torch's schemas."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(f"{function.__name__}({arguments}) -> {result}")
        LIBRARY.impl(function.__name__, function, "CPU")
        return function

    return register


def refuse_unless(*allowed: bool) -> None:
    if not all(allowed):
        raise NotImplementedError("this stand-in knows plain causal attention and chains of drafts only")


# Slots of the KV cache -----------------------------------------------------------------------------------------------


@operator("Tensor requests, Tensor(a!) slots, Tensor starts, Tensor ends, Tensor taken, int width")
def assign_req_to_token_pool_cpu(
    requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, taken: Tensor, width: int
) -> None:
    """Enter the slots ``taken`` in each request's row, one request after the other."""
    lengths = (ends - starts).tolist()
    parts = taken[: sum(lengths)].split(lengths)
    for row, start, end, part in zip(requests.tolist(), starts.tolist(), ends.tolist(), parts, strict=True):
        slots[row, start:end] = part.to(slots.dtype)


@operator("Tensor requests, Tensor slots, Tensor starts, Tensor ends, Tensor(a!) out, int width")
def assign_extend_cache_locs_cpu(
    requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, out: Tensor, width: int
) -> None:
    """The opposite: read them out of the rows."""
    rows = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    read = torch.cat([slots[row, start:end] for row, start, end in rows])
    out[: len(read)] = read


@operator("Tensor requests, Tensor slots, Tensor lengths, Tensor(a!) out, int width, int topk, int steps")
def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, slots: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    """The slots that follow each request's tokens."""
    count = topk * steps
    for number, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        out[number * count : (number + 1) * count] = slots[row, length : length + count]


@operator("Tensor slots, Tensor requests, Tensor lengths, int topk, int steps, int width", "Tensor")
def build_draft_decode_metadata_cpu(
    slots: Tensor, requests: Tensor, lengths: Tensor, topk: int, steps: int, width: int
) -> Tensor:
    refuse_unless(topk == 1)
    return slots[requests]


@operator("Tensor pointers, Tensor strides, Tensor targets, Tensor sources")
def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Move slots in each of the buffers at ``pointers``, all read before the first is written."""
    for base, width in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * width, width) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * width, row, width)


# Attention -----------------------------------------------------------------------------------------------------------


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Attention of the last positions over all; [positions, heads, size] each, fewer heads in keys and values."""
    shared = query.shape[1] // keys.shape[1]
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (query, keys, values))
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[1] - q.shape[1])
    k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)


@operator(
    "Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_cache, Tensor v_cache, float k_scale, float v_scale,"
    " Tensor slots, Tensor requests, Tensor lengths, Tensor new_lengths, Tensor new_starts, int longest, float scale,"
    " float cap, bool cross, int window, Tensor? encoder_lengths, Tensor? sinks, Tensor? tree, bool causal"
)
def extend_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    slots: Tensor,
    requests: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    new_starts: Tensor,
    longest: int,
    scale: float,
    cap: float,
    cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
    tree: Tensor | None,
    causal: bool,
) -> None:
    refuse_unless(tree is None, sinks is None, not cross, not cap, window <= 0)
    for row, length, count, start in zip(
        requests.tolist(), lengths.tolist(), new_lengths.tolist(), new_starts.tolist(), strict=True
    ):
        old, new = slots[row, : length - count].long(), slice(start, start + count)
        keys = torch.cat([k_cache[old], k[new].view(count, *k_cache.shape[1:])])
        values = torch.cat([v_cache[old], v[new].view(count, *v_cache.shape[1:])])
        out[new] = attend(q[new], keys, values, scale, causal=causal).to(out.dtype)


@operator(
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, Tensor(c!) out, Tensor? k,"
    " Tensor? v, Tensor places, Tensor scratch, Tensor slots, Tensor requests, Tensor lengths, float scale, float cap,"
    " bool cross, int window, Tensor? encoder_lengths, Tensor? sinks"
)
def decode_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    places: Tensor,
    scratch: Tensor,
    slots: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scale: float,
    cap: float,
    cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
) -> None:
    refuse_unless(sinks is None, not cross, not cap, window <= 0)
    if k is not None and v is not None:
        k_cache[places] = k.view(-1, *k_cache.shape[1:])
        v_cache[places] = v.view(-1, *v_cache.shape[1:])
    for number, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        seen, one = slots[row, :length].long(), slice(number, number + 1)
        out[one] = attend(q[one], k_cache[seen], v_cache[seen], scale, causal=False).to(out.dtype)


# A chain of drafts: what is drafted, and how much of it the target agrees with ---------------------------------------


@operator(
    "Tensor parents, Tensor selected, Tensor lengths, Tensor(a!) mask, Tensor(b!) positions, Tensor(c!) index,"
    " Tensor(d!) next_token, Tensor(e!) next_sibling, int topk, int depth, int count, int mask_mode"
)
def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    count: int,
    mask_mode: int,
) -> None:
    """Each draft follows the one before and sees those before it."""
    refuse_unless(topk == 1, mask_mode == 1)
    requests, step = lengths.numel(), torch.arange(count)
    positions.view(requests, count).copy_(lengths.view(requests, 1) + step)
    index.view(requests, count).copy_(torch.arange(requests * count).view(requests, count))
    next_token.view(requests, count).copy_(torch.where(step < count - 1, step + 1, -1))
    mask.view(-1)[: requests * count**2].view(requests, count, count).copy_(torch.ones(count, count).tril().bool())


@operator(
    "Tensor(a!) predicted, Tensor(b!) accepted, Tensor(c!) accepted_count, Tensor drafts, Tensor index,"
    " Tensor next_token, Tensor next_sibling, Tensor target"
)
def verify_tree_greedy_cpu(
    predicted: Tensor,
    accepted: Tensor,
    accepted_count: Tensor,
    drafts: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target: Tensor,
) -> None:
    """Along the chain as long as each draft is what the target says there."""
    wanted = target.reshape(-1)
    for request in range(drafts.shape[0]):
        places = index[request].tolist()
        count = 0
        while count + 1 < accepted.shape[1] and drafts[request, count + 1] == wanted[places[count]]:
            count += 1
        for step in range(count + 1):
            accepted[request, step] = places[step]
            predicted[places[step]] = wanted[places[step]]
        accepted_count[request] = count


@operator("Tensor tokens, Tensor counts, Tensor(a!) out, int stride")
def fill_bonus_tokens_cpu(tokens: Tensor, counts: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    out.copy_(tokens.reshape(-1)[torch.arange(len(counts)) * stride + counts.long() - 1])


@operator("Tensor accepted, Tensor slots, Tensor(a!) out")
def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    kept = accepted[accepted > -1].long()
    out[: len(kept)] = slots[kept]


# The loader of Hy3's drafter empties the GPU's cache and waits for the GPU.
torch.cuda.synchronize = lambda *_arguments: None
torch.cpu.empty_cache = lambda: None
