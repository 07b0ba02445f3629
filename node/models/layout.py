"""How a copy of a model is split into files: the header bytes and the size of each.

A node that has no file makes sparse ones of this, with all tensors where the source has them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from node.errors import ModelError
from node.models.index import ModelIndex

_MAGIC = b"SWARMLAY1\n"
_COUNT = struct.Struct("<I")
_FILE = struct.Struct("<QQ")
#: llama.cpp's split files carry their number in five digits; nobody has made a thousand.
FILES_MAX = 1000
#: Vocabularies of a million tokens take some 50 MB.
LAYOUT_BYTES_MAX = 128 << 20
# The largest file. Sparse files of more are refused by common file systems (ext4: 16 TiB).
_FILE_BYTES_MAX = 1 << 44


@dataclass(frozen=True)
class FileHead:
    """The head of one file: its whole size, and its bytes up to the first tensor's data."""

    size_bytes: int
    header: bytes


@dataclass(frozen=True)
class Layout:
    """The heads of a model's files, in their order."""

    files: tuple[FileHead, ...]

    def file_names(self) -> tuple[str, ...]:
        """Names that we give the files: llama.cpp wants those of a split model numbered."""
        count = len(self.files)
        if count == 1:
            return ("model.gguf",)
        return tuple(f"model-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))

    def to_bytes(self) -> bytes:
        """The form on the wire."""
        parts = [_MAGIC, _COUNT.pack(len(self.files))]
        for file in self.files:
            parts += [_FILE.pack(file.size_bytes, len(file.header)), file.header]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Reads what `to_bytes` made. Raises ModelError. The headers are not looked at: that is for their reader."""
        view = memoryview(data)
        if len(data) > LAYOUT_BYTES_MAX or bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise ModelError("this is no layout of a model's files")
        try:
            position = len(_MAGIC)
            (count,) = _COUNT.unpack_from(view, position)
            position += _COUNT.size
            if not 1 <= count <= FILES_MAX:
                raise ModelError(f"a layout of {count} files; 1 to {FILES_MAX} are allowed")
            files = []
            for _ in range(count):
                size, length = _FILE.unpack_from(view, position)
                position += _FILE.size
                if not length <= size <= _FILE_BYTES_MAX or length > len(data) - position:
                    raise ModelError("a layout with a file of an impossible size")
                files.append(FileHead(size, bytes(view[position : position + length])))
                position += length
        except struct.error:
            raise ModelError("a layout that ends too early") from None
        if position != len(data):
            raise ModelError(f"a layout with {len(data) - position} bytes too many")
        return cls(tuple(files))


def read_layout(index: ModelIndex) -> Layout:
    """The layout of a local copy. Blocks. Raises ModelError."""
    return Layout(tuple(_read_head(path, index) for path in index.paths))


def _read_head(path: str, index: ModelIndex) -> FileHead:
    try:
        size = Path(path).stat().st_size
        # A part without tensors is all header.
        end = min((tensor.offset for tensor in index.tensors if tensor.path == path), default=size)
        with Path(path).open("rb") as file:
            header = file.read(min(end, LAYOUT_BYTES_MAX))
    except OSError as error:
        raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error
    if len(header) != end:
        raise ModelError(f"the header of {path} cannot be given to others: it is longer than {LAYOUT_BYTES_MAX} bytes")
    return FileHead(size, header)


def write_layout(layout: Layout, folder: Path) -> None:
    """Makes the sparse files in ``folder``: headers, and holes where tensors belong. Raises OSError.

    The caller sees to their being on the disk.
    """
    for name, head in zip(layout.file_names(), layout.files, strict=True):
        with (folder / name).open("xb") as file:
            file.write(head.header)
            file.truncate(head.size_bytes)
