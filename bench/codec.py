"""Encoding and decoding: against eager torch, and against reading the same float32 bytes.

Values are float32 bytes encoded or decoded per second. The torch versions make the same
numbers in the same format (one bfloat16 scale per 128 values), from tensors' operations.
"""

from __future__ import annotations

import numpy as np
import torch

import common
from diloco_protocol.arrays import codec

BLOCK = 128


def main() -> None:
    parser = common.arguments(__doc__ or "")
    common.add_threads(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    elements = BLOCK * (4_000 if args.quick else 80_000)
    rounds = 3 if args.quick else 15
    values = np.random.default_rng(0).standard_normal(elements, np.float32)
    tensor = torch.from_numpy(values)
    rows = []
    for encoding in ("int4", "int8", "int2", "bfloat16"):
        encoded = codec.encode(values, encoding)
        decoded = codec.decode(encoded, encoding, elements)
        other = torch_encode(tensor, encoding)
        ours, theirs = (
            float(np.linalg.norm(array - values)) for array in (decoded, torch_decode(*other, encoding).numpy())
        )
        if not 0.95 * ours <= theirs <= 1.05 * ours:
            raise SystemExit(f"{encoding}: torch's error is {theirs}, ours {ours}")

        rows += both_ways(encoding, values, args.threads, rounds)
    common.show(rows, args.json, f"{elements} values, {args.threads} threads")


def both_ways(encoding: str, values: np.ndarray, threads: int, rounds: int) -> list[common.Row]:
    """Figures of encoding and of decoding."""
    tensor = torch.from_numpy(values)
    encoded = codec.encode(values, encoding)
    decoded = np.empty_like(values)
    other = torch_encode(tensor, encoding)
    read = common.reading([values], threads)
    pairs = {
        "encode": (
            lambda: codec.encode(values, encoding, encoded, threads=threads),
            lambda: torch_encode(tensor, encoding),
        ),
        "decode": (
            lambda: codec.decode(encoded, encoding, values.size, decoded, threads=threads),
            lambda: torch_decode(*other, encoding),
        ),
    }
    rows = []
    for direction, (ours, theirs) in pairs.items():
        rows += common.compare(
            f"codec {encoding} {direction}",
            ours,
            {"eager torch": theirs, "reading the same bytes": read},
            work=4e-9 * values.size,
            unit="GB/s",
            rounds=rounds,
        )
    return rows


def torch_encode(values: torch.Tensor, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, packed) of values whose number is a multiple of a block."""
    if encoding == "bfloat16":
        return torch.empty(0), values.to(torch.bfloat16)
    rows = values.view(-1, BLOCK)
    if encoding == "int2":
        scales = rows.square().mean(1, keepdim=True).sqrt().to(torch.bfloat16)
        codes = (rows.abs() > scales.float() * 0.9816).to(torch.uint8) | (rows < 0).to(torch.uint8) << 1
        a, b, c, d = codes.view(-1, 4, BLOCK // 4).unbind(1)
        return scales, a | b << 2 | c << 4 | d << 6
    most = 127 if encoding == "int8" else 7
    scales = (rows.abs().amax(1, keepdim=True) / most).to(torch.bfloat16)
    numbers = (rows / scales.float()).round().clamp(-most, most).to(torch.int8)
    if encoding == "int8":
        return scales, numbers
    low, high = numbers.view(torch.uint8).view(-1, 2, BLOCK // 2).unbind(1)
    return scales, low & 15 | high << 4


def torch_decode(scales: torch.Tensor, packed: torch.Tensor, encoding: str) -> torch.Tensor:
    if encoding == "bfloat16":
        return packed.float()
    if encoding == "int8":
        return (packed.float() * scales.float()).view(-1)
    if encoding == "int4":
        numbers = torch.stack([packed & 15, packed >> 4], 1).view(-1, BLOCK)
        return (((numbers ^ 8).to(torch.int8) - 8).float() * scales.float()).view(-1)
    codes = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 1).view(-1, BLOCK)
    levels = torch.tensor([0.4528, 1.510, -0.4528, -1.510])[codes.int()]
    return (levels * scales.float()).view(-1)


if __name__ == "__main__":
    main()
