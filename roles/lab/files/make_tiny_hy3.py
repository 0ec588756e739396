# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a tiny Hy3 checkpoint whose right answers are known: real file formats, real names, real engines, about 36 MiB.

The next token is a known function of the current one. Each token has its own direction, a row of a Hadamard matrix;
row y of ``lm_head`` is the sum of the directions of the tokens that y follows. The embedding adds to a token's
direction those of its two experts, so that rounding never changes the routing. All other weights are noise: so large
that a missing or misplaced slice of any of them shows in the logprobs, too small to change the most likely token.
The drafter's ``eh_proj`` passes the embedding of the newest token on, so it guesses the same function.

Standard library only, and integer arithmetic where it counts: a seed gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# Vocabulary -----------------------------------------------------------------------------------------------------------

SPECIAL = ("<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>", "<tool>", "<tools>")
# The markers that the engines' parsers look for: not special, so that they stay in the text that is parsed.
MARKERS = (
    *("<think>", "</think>", "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
NAMED_WORDS = ("Paris", "get_weather", "city", "Tokyo", " France", " has", " one", " capital")
VOCAB_SIZE = 448
CYCLE = tuple(f" w{n:03d}" for n in range(VOCAB_SIZE - 256 - len(SPECIAL) - len(MARKERS) - len(NAMED_WORDS)))


def byte_alphabet() -> list[str]:
    """The printable character that a byte-level BPE writes for each byte 0..255 (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]


BYTES = tuple(byte_alphabet())
TOKENS = (*SPECIAL, *MARKERS, *BYTES, *NAMED_WORDS, *CYCLE)
IDS = {token: number for number, token in enumerate(TOKENS)}

# What follows what ----------------------------------------------------------------------------------------------------

ANSWER = ("<assistant>", "Paris", ".", "<eos>", CYCLE[0])
REASONING = ("<think>", " France", " has", " one", " capital", "</think>", "Paris")
TOOL_CALL = (
    *("<tools>", "<tool_calls>", "<tool_call>", "get_weather", "<tool_sep>", "<arg_key>", "city", "</arg_key>"),
    *("<arg_value>", "Tokyo", "</arg_value>", "</tool_call>", "</tool_calls>", "<eos>"),
)


def successors() -> dict[str, str]:
    """The token that follows each token. Few tokens follow several: a long row of lm_head would win by noise alone."""
    follows: dict[str, str] = {}
    for chain in (ANSWER, REASONING, TOOL_CALL, (*CYCLE, CYCLE[0])):
        follows.update(pairwise(chain))
    printable = BYTES[0x20:0x7F]
    rest = sorted((token for token in TOKENS if token not in follows), key=lambda token: token in printable)
    follows.update(pairwise((*rest, CYCLE[1])))
    return follows


SUCCESSORS = successors()


def successor(token: str) -> str:
    """The token that follows ``token``, both as the vocabulary writes them (a space byte is U+0120)."""
    return SUCCESSORS[token]


def expected_text(count: int, after: str = "<eos>") -> str:
    """The text of ``count`` tokens generated after the token ``after``, special ones left out as the engines do."""
    text: list[str] = []
    for _token in range(count):
        after = SUCCESSORS[after]
        text.append("" if after in SPECIAL else after)
    return "".join(text)


# Sizes: every one that tensor parallelism divides is a multiple of 4 --------------------------------------------------

HIDDEN = 512
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 128
DENSE_INTERMEDIATE = 1024
EXPERT_INTERMEDIATE = 256
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
DENSE_LAYERS = 1
MAX_POSITIONS = 262144

# Standard deviations, tuned with the real engine: tests/integration/test_tiny_checkpoint.py has what they make visible.
PROJECTION_NOISE = 0.03
ROUTER_NOISE = 0.005
EH_PROJ_NOISE = 0.004
NORM_NOISE = 0.2
EXPERT_BIAS_NOISE = 0.01
# The right logit is about 512 / 32 x cos(embedding, hidden state) = 12: sure under sampling too, and bfloat16 still
# resolves it to 1/16.
HEAD_SCALE = 1 / 32
# Gives the two chosen experts router logits near 2, where their weights still depend on the noise.
ROUTER_SCALE = 1 / 128
# A wrong draft names the word this far along the cycle.
WRONG_DRAFT_STEP = 7


class Tensor(NamedTuple):
    """One tensor as it will stand in a shard: safetensors dtype, shape, little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bf16(value: float) -> bytes:
    """The two bytes of ``value`` rounded to the nearest bfloat16."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x8000) >> 16)


def pack_bf16(values: list[int], value_of: Callable[[int], float]) -> bytes:
    """Encode small integers, each standing for ``value_of`` it: there are few, so each is rounded only once."""
    encoded = {value: bf16(value_of(value)) for value in set(values)}
    return b"".join([encoded[value] for value in values])


def sign(row: int, column: int) -> int:
    """Entry of Sylvester's Hadamard matrix: rows are orthogonal and all entries are +1 or -1."""
    return -1 if (row & column).bit_count() & 1 else 1


def experts_of(token: int) -> tuple[int, int]:
    """The two experts that every layer routes a token to; all pairs occur."""
    first = token % EXPERTS
    return first, (first + 1 + token // EXPERTS % (EXPERTS - 1)) % EXPERTS


class Weights:
    """All tensors of the checkpoint, from the seed alone."""

    def __init__(self, *, seed: int, layers: int, acceptance: float) -> None:
        self.seed = seed
        self.layers = layers
        self.acceptance = acceptance
        flips = self._random("signs")
        column_signs = [flips.choice((-1, 1)) for _column in range(HIDDEN)]
        # One direction a token, then one an expert; all are orthogonal.
        self.directions = [
            [sign(row, column) * column_signs[column] for column in range(HIDDEN)]
            for row in range(VOCAB_SIZE + EXPERTS)
        ]
        # The last norm has random signs and the head undoes them: a drafter whose norm was not loaded guesses wrong.
        self.norm_signs = [flips.choice((-1, 1)) for _column in range(HIDDEN)]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once, in the order in which the published checkpoint lays them out."""
        yield self._embedding()
        for layer in range(self.layers):
            yield from self._decoder(f"model.layers.{layer}", dense=layer < DENSE_LAYERS)
        yield self._last_norm("model.norm.weight")
        yield self._head()
        yield from self._drafter(f"model.layers.{self.layers}")

    def _embedding(self) -> Tensor:
        halves: list[int] = []
        for token in range(VOCAB_SIZE):
            first, second = (self.directions[VOCAB_SIZE + expert] for expert in experts_of(token))
            halves += [2 * own + a + b for own, a, b in zip(self.directions[token], first, second, strict=True)]
        data = pack_bf16(halves, lambda entry: entry / 2)
        return Tensor("model.embed_tokens.weight", "BF16", (VOCAB_SIZE, HIDDEN), data)

    def _decoder(self, prefix: str, *, dense: bool) -> Iterator[Tensor]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._norm(f"{prefix}.{norm}.weight", HIDDEN)
        for norm in ("q_norm", "k_norm"):
            yield self._norm(f"{prefix}.self_attn.{norm}.weight", HEAD_DIM)
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            yield self._projection(f"{prefix}.self_attn.{name}", heads * HEAD_DIM, HIDDEN)
        yield self._projection(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        if dense:
            yield from self._feed_forward(f"{prefix}.mlp", DENSE_INTERMEDIATE)
            return
        yield self._router(f"{prefix}.mlp.router.gate.weight")
        yield self._float32(f"{prefix}.mlp.expert_bias", [0.0] * EXPERTS, (EXPERTS,), EXPERT_BIAS_NOISE)
        for expert in range(EXPERTS):
            yield from self._feed_forward(f"{prefix}.mlp.experts.{expert}", EXPERT_INTERMEDIATE)
        yield from self._feed_forward(f"{prefix}.mlp.shared_mlp", EXPERT_INTERMEDIATE)

    def _feed_forward(self, prefix: str, intermediate: int) -> Iterator[Tensor]:
        yield self._projection(f"{prefix}.gate_proj", intermediate, HIDDEN)
        yield self._projection(f"{prefix}.up_proj", intermediate, HIDDEN)
        yield self._projection(f"{prefix}.down_proj", HIDDEN, intermediate)

    def _router(self, name: str) -> Tensor:
        means = [entry * ROUTER_SCALE for row in self.directions[VOCAB_SIZE:] for entry in row]
        return self._float32(name, means, (EXPERTS, HIDDEN), ROUTER_NOISE)

    def _drafter(self, prefix: str) -> Iterator[Tensor]:
        for norm in ("enorm", "hnorm"):
            yield self._norm(f"{prefix}.{norm}.weight", HIDDEN)
        yield self._eh_proj(f"{prefix}.eh_proj.weight")
        yield from self._decoder(prefix, dense=False)
        yield self._last_norm(f"{prefix}.final_layernorm.weight")

    def _head(self) -> Tensor:
        rows = [[0] * HIDDEN for _row in range(VOCAB_SIZE)]
        for token, follower in SUCCESSORS.items():
            row = rows[IDS[follower]]
            for column, entry in enumerate(self.directions[IDS[token]]):
                row[column] += entry * self.norm_signs[column]
        flat = [entry for row in rows for entry in row]
        return Tensor("lm_head.weight", "BF16", (VOCAB_SIZE, HIDDEN), pack_bf16(flat, lambda entry: entry * HEAD_SCALE))

    def _eh_proj(self, name: str) -> Tensor:
        """Columns: the newest token's embedding, passed on, then the target's hidden state, ignored."""
        rows = [[HIDDEN if row == column else 0 for column in range(HIDDEN)] for row in range(HIDDEN)]
        wrong = self._random("wrong drafts").sample(range(len(CYCLE)), round(len(CYCLE) * (1 - self.acceptance)))
        for word in wrong:
            right = self.directions[IDS[CYCLE[word]]]
            other = self.directions[IDS[CYCLE[(word + WRONG_DRAFT_STEP) % len(CYCLE)]]]
            for row, difference in zip(rows, (new - old for new, old in zip(other, right, strict=True)), strict=True):
                if difference:
                    row[:] = [entry + difference * factor for entry, factor in zip(row, right, strict=True)]
        noise = self._noise(name, HIDDEN * 2 * HIDDEN, EH_PROJ_NOISE)
        data = bytearray(noise)
        for index, row in enumerate(rows):
            start = index * 2 * HIDDEN
            for column, entry in enumerate(row):
                if entry:
                    at = 2 * (start + column)
                    data[at : at + 2] = bf16(entry / HIDDEN)
        return Tensor(name, "BF16", (HIDDEN, 2 * HIDDEN), bytes(data))

    def _last_norm(self, name: str) -> Tensor:
        return Tensor(name, "BF16", (HIDDEN,), pack_bf16(self.norm_signs, float))

    def _norm(self, name: str, size: int) -> Tensor:
        return Tensor(name, "BF16", (size,), self._noise(name, size, NORM_NOISE, mean=1.0))

    def _projection(self, prefix: str, rows: int, columns: int) -> Tensor:
        name = f"{prefix}.weight"
        return Tensor(name, "BF16", (rows, columns), self._noise(name, rows * columns, PROJECTION_NOISE))

    def _float32(self, name: str, means: list[float], shape: tuple[int, ...], deviation: float) -> Tensor:
        levels = uniform_levels()
        draws = self._random(name).randbytes(len(means))
        values = [mean + deviation * levels[draw] for mean, draw in zip(means, draws, strict=True)]
        return Tensor(name, "F32", shape, struct.pack(f"<{len(values)}f", *values))

    def _noise(self, name: str, count: int, deviation: float, mean: float = 0.0) -> bytes:
        """``count`` bfloat16 numbers, uniform over 256 levels: one random byte each, so that millions take no time."""
        levels = [bf16(mean + deviation * level) for level in uniform_levels()]
        draws = self._random(name).randbytes(count)
        data = bytearray(2 * count)
        data[0::2] = draws.translate(bytes(level[0] for level in levels))
        data[1::2] = draws.translate(bytes(level[1] for level in levels))
        return bytes(data)

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")  # noqa: S311  reproducible noise, no secret


def uniform_levels() -> list[float]:
    """256 evenly spaced numbers with mean 0 and standard deviation 1."""
    return [(byte - 127.5) / (256 / 12**0.5) for byte in range(256)]


# Files ----------------------------------------------------------------------------------------------------------------


def config(layers: int) -> dict[str, Any]:
    """config.json: the published keys; vLLM reads expert_hidden_dim where SGLang reads moe_intermediate_size."""
    return {
        "architectures": ["HYV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": IDS["<bos>"],
        "dtype": "bfloat16",
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "eos_token_id": IDS["<eos>"],
        "expert_hidden_dim": EXPERT_INTERMEDIATE,
        "first_k_dense_replace": DENSE_LAYERS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.006,
        "intermediate_size": DENSE_INTERMEDIATE,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "hy_v3",
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "pad_token_id": IDS["<pad>"],
        "qk_norm": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "route_norm": True,
        "router_scaling_factor": 2.826,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


# The last token of the prompt decides the answer. A reasoning effort asks for a thought first, tools for a call of
# get_weather, and a tool's result or nothing at all for the plain answer.
CHAT_TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else "no_think" %}
{%- set thinking = enable_thinking if enable_thinking is defined else effort not in ["no_think", "none"] %}
{{- "<bos>" }}
{%- if tools %}{{- "<system>" ~ (tools | tojson) }}{%- endif %}
{%- for message in messages %}
{{- "<" ~ message.role ~ ">" ~ (message.content or "") }}
{%- if message.role == "assistant" %}{{- "<eos>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<assistant>" }}
{%- if tools and messages[-1].role != "tool" %}{{- "<tools>" }}
{%- elif thinking %}{{- "<think>" }}
{%- endif %}
{%- endif %}
"""


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges; every word longer than a byte is an added token."""
    added = [token for token in TOKENS if token not in BYTES]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": IDS[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL,
            }
            for token in added
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": IDS,
            "merges": [],
        },
    }


def small_files(layers: int) -> dict[str, str]:
    """Every file but the weights: name to content."""
    tokens = {name: IDS[f"<{name[:3]}>"] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer_config = {
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    contents = {
        "config.json": config(layers),
        "generation_config.json": tokens,
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }
    return {
        "chat_template.jinja": CHAT_TEMPLATE,
        **{name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()},
    }


def shard(tensors: list[Tensor]) -> bytes:
    """One safetensors file, written here so that the lab needs no library and the reader under test no help."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors)


def checkpoint(*, seed: int, shards: int, acceptance: float, layers: int) -> dict[str, bytes]:
    """Every file of the checkpoint: name to content."""
    # Four bytes before two: a tensor's offset must be a multiple of its element size.
    tensors = sorted(
        Weights(seed=seed, layers=layers, acceptance=acceptance).tensors(), key=lambda tensor: tensor.dtype != "F32"
    )
    if shards > len(tensors):
        raise ValueError(f"{shards} shards are more than the {len(tensors)} tensors; ask for fewer shards.")
    files = {name: content.encode() for name, content in small_files(layers).items()}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = tensors[number::shards]
        files[name] = shard(part)
        weight_map.update((tensor.name, name) for tensor in part)
    index = {
        "metadata": {"total_size": sum(len(tensor.data) for tensor in tensors)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    files["model.safetensors.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    return files


def write(out: Path, files: dict[str, bytes]) -> bool:
    """Make ``out`` hold exactly ``files``, all or nothing; say whether it had to be written.

    Raises FileExistsError when ``out`` holds anything else: it may be a checkpoint somebody needs.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            with (partial / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if out.exists() and any(out.iterdir()):
            present = {entry.name for entry in out.iterdir()}
            if present != set(files) or filecmp.cmpfiles(out, partial, list(files), shallow=False)[0] != list(files):
                raise FileExistsError(
                    f"{out} holds something else than this checkpoint; name another directory or remove it."
                )
            return False
        partial.rename(out)
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Write a tiny Hy3 checkpoint with known answers.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make; an identical one is left alone")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    parser.add_argument("--shards", type=int, default=4, help="number of weight files (default: 4)")
    parser.add_argument("--acceptance", type=float, default=1.0, help="share of right drafts, 0 to 1 (default: 1.0)")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers, the first one dense (default: 3)")
    options = parser.parse_args(argv)
    if not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance {options.acceptance} is not a share; give a number from 0 to 1.")
    if options.layers <= DENSE_LAYERS:
        parser.error(
            f"--layers {options.layers} leaves no layer with experts, and engines refuse that; give 2 or more."
        )
    if options.shards < 1:
        parser.error(f"--shards {options.shards} holds no weights; give 1 or more.")
    return options


def main(argv: list[str]) -> int:
    """Write the checkpoint and print ``changed`` or ``unchanged``."""
    options = arguments(argv)
    out = options.out.absolute()
    try:
        files = checkpoint(
            seed=options.seed, shards=options.shards, acceptance=options.acceptance, layers=options.layers
        )
        print("changed" if write(out, files) else "unchanged")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
