"""Files that nobody should write, written byte by byte."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAGIC = b"seqgp checkpoint file\r\n\x1a"


def record(tensor: Tensor) -> tuple[dict[str, Any], bytes]:
    """The entry of a tensor in the header, and its data."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    entry = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": None,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return entry, data


def forge(path: Path, header: Any, data: bytes = b"") -> None:
    """Write any header with a correct digest; text is taken as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    digest = hashlib.sha256(text).digest()
    path.write_bytes(struct.pack("<24sQ32s", MAGIC, len(text), digest) + text + data)


def header_of(content: Any, tensors: Any, **changes: Any) -> dict[str, Any]:
    """A header as `seqgp.checkpoint.storage` writes it, or not quite."""
    proper = {"version": 2, "written_by": "0.1.0", "byteorder": sys.byteorder}
    return {**proper, "tensors": tensors, "content": content, **changes}


def forge_content(path: Path, content: Any) -> None:
    """Write any content as a complete file."""
    entries, chunks = [], []

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            entry, data = record(value)
            entries.append(entry)
            chunks.append(data)
            return {"$tensor": len(entries) - 1}
        if isinstance(value, list):
            return [encode(item) for item in value]
        if isinstance(value, dict):
            return {key: encode(item) for key, item in value.items()}
        return value

    encoded = encode(content)
    forge(path, header_of(encoded, entries), b"".join(chunks))
