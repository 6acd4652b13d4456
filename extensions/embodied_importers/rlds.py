"""RLDS, as TensorFlow Datasets writes it and OpenVLA's datasets are published: read without TensorFlow.

    FOLDER/dataset_info.json                           name, splits, records in each shard
    FOLDER/features.json                               a tree of features: names, shapes, types, encodings
    FOLDER/NAME-SPLIT.tfrecord-00000-of-00016          a record per episode

A record is a `tf.train.Example`: a flat map from a feature's path (`steps/observation/image`) to the values of all
steps, one after the other. Framing of a record (tensorflow/core/lib/io/record_writer.h): its length (uint64), a
checksum of that, the record, a checksum of it; checksums are CRC-32C, rotated and shifted by a constant.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from pydantic import BaseModel, Field, ValidationError

from embodied.demonstrations import metadata
from embodied.demonstrations.layout import DatasetError
from embodied.errors import shown

INFO, FEATURES = "dataset_info.json", "features.json"
STEPS = "steps/"
"""Begins the path of a feature of which each step has a value."""
FRAME = 16
"""Bytes around a record: its length, and two checksums."""
LARGEST_RECORD = 2**31 - 1
"""Bytes; a protocol buffer cannot be larger."""
DEEPEST = 32
"""Levels of features in features."""
LARGEST_SIZE = 2**20
"""Largest size of one dimension of a feature."""
AGAIN = "download or build the dataset again"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


class _Split(BaseModel):
    name: str
    shardLengths: Annotated[list[Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=10**6)] = []
    filepathTemplate: str = _TEMPLATE


class _Info(BaseModel):
    """dataset_info.json, as far as it is read. TFDS writes whole numbers as text."""

    name: str
    version: str = ""
    fileFormat: str = "tfrecord"
    splits: list[_Split]


@dataclass(frozen=True)
class Spec:
    """A feature as features.json says it, and how its values lie in a record."""

    kind: str
    """`numbers`, `text` or `picture`; for what is not read, what it is, in words."""
    dtype: str = ""
    """NumPy's name of the type."""
    shape: tuple[int | None, ...] = ()
    """Shape of one value; None where it varies."""
    encoding: str = "none"
    """For numbers `none`, `bytes` or `zlib`: the latter two are one text per value."""

    @property
    def is_read(self) -> bool:
        return self.kind in ("numbers", "text", "picture")

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.kind} {self.dtype} [{sizes}]".replace("  ", " ")


@dataclass(frozen=True)
class Record:
    """One episode: n steps."""

    split: str
    number: int
    """In the dataset, all splits one after the other."""
    where: str
    """File and place in it, for messages."""
    steps: int
    values: Mapping[str, npt.NDArray[Any] | list[bytes]]
    """By the feature's path without `steps/`: numbers [n, *shape]; texts and encoded pictures as n byte strings."""
    about: Mapping[str, Any]
    """Features of the whole episode by their path: a number or a text."""


class RLDS:
    """An RLDS dataset. `folder` is that of one version, or one above it that has a single one.

    Raises `DatasetError`, which names the file, where something is missing, damaged, of another format than TFRecord,
    or there and not mentioned in dataset_info.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _version_folder(folder)
        self.info = _read_info(self.folder / INFO)
        features = _read_features(self.folder / FEATURES)
        self.steps = {name.removeprefix(STEPS): spec for name, spec in features.items() if name.startswith(STEPS)}
        """Features of a step by their path."""
        self.about = {name: spec for name, spec in features.items() if not name.startswith(STEPS)}
        """Features of an episode by their path."""
        if not self.steps:
            raise DatasetError(
                f"{self.folder / FEATURES} has no feature `steps`: it is a TFDS dataset, but not of episodes (RLDS); "
                f"it has: {shown(', '.join(features), 300)}"
            )
        self.files = {split.name: self._files_of(split) for split in self.info.splits if split.shardLengths}
        """Shards of each split with the number of their records, in order."""
        self._check_files()

    def __len__(self) -> int:
        """Episodes of all splits."""
        return sum(count for files in self.files.values() for _, count in files)

    def episodes(self, wanted: frozenset[int] | None = None) -> Iterator[Record]:
        """The episodes in order; with `wanted` those of these numbers alone: of others only the framing is read."""
        first = 0
        for split, files in self.files.items():
            for path, count in files:
                numbers = range(first, first + count)
                first += count
                if wanted is not None and wanted.isdisjoint(numbers):
                    continue
                found = -1
                for found, data in enumerate(records(path)):
                    if found < count and (wanted is None or numbers[found] in wanted):
                        where = f"{path}, record {found}"
                        yield self._record(split, numbers[found], where, _example(where, data))
                if found + 1 != count:
                    raise DatasetError(f"{path} holds {found + 1} records, and {INFO} says {count}; {AGAIN}")

    def _record(self, split: str, number: int, where: str, example: Mapping[str, Any]) -> Record:
        values: dict[str, npt.NDArray[Any] | list[bytes]] = {}
        for name, spec in self.steps.items():
            if spec.is_read:
                values[name] = _values(where, STEPS + name, spec, example.get(STEPS + name))
        lengths = {name: len(found) for name, found in values.items()}
        steps = next(iter(lengths.values()), 0)
        for name, length in lengths.items():
            if length != steps or not length:
                raise DatasetError(
                    f"{where}: {shown(name)} has {length} values, and {shown(next(iter(lengths)))} {steps}: every step "
                    f"has one of each, and an episode at least one step; {AGAIN}"
                )
        about = {}
        for name, spec in self.about.items():
            if spec.is_read and spec.kind != "picture" and not spec.shape:
                found = _values(where, name, spec, example.get(name))
                if len(found) != 1:
                    raise DatasetError(f"{where}: {shown(name)} has {len(found)} values, and one is needed; {AGAIN}")
                about[name] = found[0].item() if isinstance(found, np.ndarray) else text(where, name, found[0])
        return Record(split, number, where, steps, values, about)

    def _files_of(self, split: _Split) -> list[tuple[Path, int]]:
        of = len(split.shardLengths)
        found = []
        for shard, count in enumerate(split.shardLengths):
            name = split.filepathTemplate
            for key, value in {
                "DATASET": self.info.name, "SPLIT": split.name, "FILEFORMAT": "tfrecord",
                "SHARD_INDEX": f"{shard:05d}", "NUM_SHARDS": f"{of:05d}", "SHARD_X_OF_Y": f"{shard:05d}-of-{of:05d}",
            }.items():  # fmt: skip
                name = name.replace(f"{{{key}}}", value)
            if Path(name).name != name or len(name) > 250 or not name.isprintable():
                raise DatasetError(f"{self.folder / INFO}: {shown(name)} is no name of a file in its folder; {AGAIN}")
            found.append((self.folder / name, count))
        return found

    def _check_files(self) -> None:
        if not self.files:
            raise DatasetError(f"{self.folder / INFO} names no split with episodes; {AGAIN}")
        named = [path for files in self.files.values() for path, _ in files]
        missing = [path for path in named if not path.is_file()]
        if missing:
            raise DatasetError(
                f"{missing[0]} is missing, and {len(missing) - 1} more of the {len(named)} shards that {INFO} names; "
                f"{AGAIN}"
            )
        for path, count in (file for files in self.files.values() for file in files):
            if count * FRAME > path.stat().st_size:
                raise DatasetError(f"{self.folder / INFO} says that {path.name} holds {count} records, and it is too "
                                   f"small for them; {AGAIN}")  # fmt: skip
        if len(set(named)) != len(named):
            raise DatasetError(f"{self.folder / INFO} names a shard twice; {AGAIN}")
        others = sorted(set(self.folder.glob("*tfrecord*")) - set(named))
        if others:
            raise DatasetError(
                f"{others[0]} is not one of the shards that {INFO} names ({len(others)} such files): it would be left "
                "out; move it away, or restore the dataset_info.json that belongs to it"
            )


def recognises(path: Path) -> bool:
    """True for a folder of an RLDS dataset, or one above it."""
    try:
        return bool(_candidates(path))
    except OSError:
        return False


def text(where: str, name: str, data: bytes) -> str:
    """A text of a record. Raises `DatasetError`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: {shown(name)} is no UTF-8 text ({error.reason}); {AGAIN}") from None


def records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file, each checked by its checksum. Raises `DatasetError`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while file.tell() < size:
                yield _next_record(path, file, size)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror or error})") from error


def _next_record(path: Path, file: BinaryIO, size: int) -> bytes:
    begin = file.tell()
    head = file.read(12)
    if head[:2] in (b"\x1f\x8b", b"\x78\x9c") and begin == 0:
        raise DatasetError(f"{path} is a compressed TFRecord file: decompress it first (gunzip)")
    if len(head) < 12 or _masked(crc32c(head[:8])) != struct.unpack("<I", head[8:])[0]:
        raise DatasetError(f"{path}: no record begins at byte {begin}: it is cut short or damaged; {AGAIN}")
    (length,) = struct.unpack("<Q", head[:8])
    if length + 4 > size - file.tell() or length > LARGEST_RECORD:
        raise DatasetError(f"{path}: the record at byte {begin} has {length} bytes, and the file ends before; {AGAIN}")
    data, tail = file.read(length), file.read(4)
    if len(tail) < 4 or _masked(crc32c(data)) != struct.unpack("<I", tail)[0]:
        raise DatasetError(f"{path}: the record at byte {begin} has another checksum than it should; {AGAIN}")
    return data


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


_LANE = 256
"""Bytes whose checksum is computed in turn; all pieces of this length are computed at once."""


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720 B.4) of the data.

    A checksum is linear in its data: pieces are computed side by side, from a register of zero, and then added, each
    shifted by the zero bytes that stand for what follows it. A megabyte takes milliseconds.
    """
    table, lanes = _table(), 1 << max(0, math.ceil(len(data) / _LANE) - 1).bit_length()
    padded = np.zeros(lanes * _LANE, np.uint8)  # zeros before the data leave a register of zero as it is
    if data:
        padded[-len(data) :] = np.frombuffer(data, np.uint8)
    # The register's initial ones are the same as inverting the first four bytes; shorter data shift them out.
    if len(data) >= 4:
        start = len(padded) - len(data)
        padded[start : start + 4] ^= 0xFF
    register: Any = np.zeros(lanes, np.uint32)
    for column in padded.reshape(lanes, _LANE).T:
        register = table[(register ^ column) & 0xFF] ^ (register >> np.uint32(8))
    length = _LANE
    while len(register) > 1:
        register = _multiplied(_zeros(length), register[0::2]) ^ register[1::2]
        length *= 2
    found = int(register[0])
    if len(data) < 4:
        found ^= int(_multiplied(_zeros(len(data)), np.array([0xFFFFFFFF], np.uint32))[0])
    return found ^ 0xFFFFFFFF


@cache
def _table() -> npt.NDArray[np.uint32]:
    """[256] what a register's last byte becomes as it is shifted out."""
    found: npt.NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        found = (found >> np.uint32(1)) ^ np.where(found & 1, np.uint32(0x82F63B78), np.uint32(0))
    return found


@cache
def _zeros(length: int) -> npt.NDArray[np.uint32]:
    """[32] what each bit of a register becomes by so many zero bytes."""
    if length == 0:
        return (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
    if length == 1:
        bits = _zeros(0)
        return np.bitwise_xor(_table()[bits & 0xFF], bits >> 8, dtype=np.uint32)
    half = _zeros(length // 2)
    twice = _multiplied(half, half)
    return _multiplied(_zeros(1), twice) if length % 2 else twice


def _multiplied(matrix: npt.NDArray[np.uint32], registers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The registers [n] after what the matrix [32] stands for."""
    found = np.zeros_like(registers)
    for bit, column in enumerate(matrix):
        found ^= np.where(registers >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return found


@cache
def _example_class() -> type[message.Message]:
    """`tf.train.Example` (tensorflow/core/example/example.proto, feature.proto), in a pool of its own: TensorFlow in
    the same process has one too."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add(name: str, *fields: tuple[str, int, int, str | None]) -> Any:
        made = file.message_type.add(name=name)
        for number, (key, kind, label, of) in enumerate(fields, 1):
            made.field.add(name=key, number=number, type=kind, label=label, type_name=of and f".tf.{of}")
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    add("BytesList", ("value", field.TYPE_BYTES, many, None))
    add("FloatList", ("value", field.TYPE_FLOAT, many, None))
    add("Int64List", ("value", field.TYPE_INT64, many, None))
    names = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    feature = add("Feature", *((key, field.TYPE_MESSAGE, one, of) for key, of in names))
    feature.oneof_decl.add(name="kind")
    for each in feature.field:
        each.oneof_index = 0
    features = add("Features", ("feature", field.TYPE_MESSAGE, many, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, label=one, type_name=".tf.Feature")
    add("Example", ("features", field.TYPE_MESSAGE, one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def _example(where: str, data: bytes) -> Mapping[str, Any]:
    """The features of a serialised Example by their paths."""
    example: Any = _example_class()()
    try:
        example.ParseFromString(data)
    except message.DecodeError as error:
        raise DatasetError(f"{where} is no tf.train.Example ({error}); {AGAIN}") from error
    return example.features.feature


def _values(where: str, name: str, spec: Spec, feature: Any) -> npt.NDArray[Any] | list[bytes]:
    """The values of a feature, as many as there are. Raises `DatasetError`."""
    kind = None if feature is None else feature.WhichOneof("kind")
    if kind is None:
        raise DatasetError(f"{where} lacks {shown(name)}, which {FEATURES} names; {AGAIN}")
    found = getattr(feature, kind).value
    texts = spec.kind != "numbers" or spec.encoding != "none"
    if kind != ("bytes_list" if texts else "float_list" if spec.dtype.startswith("float") else "int64_list"):
        raise DatasetError(f"{where}: {shown(name)} is a {kind}, and {FEATURES} says {spec}; {AGAIN}")
    if spec.kind != "numbers":
        return list(found)
    shape = tuple(size for size in spec.shape if size is not None)
    size = math.prod(shape)
    try:
        if texts:
            dtype = np.dtype(spec.dtype)
            parts = [_unpacked(item, size * dtype.itemsize, spec.encoding) for item in found]
            return np.frombuffer(b"".join(parts), dtype).reshape(len(parts), *shape)
        if kind == "int64_list":
            whole = np.array(found, np.int64)
            array = whole.view(np.uint64) if spec.dtype == "uint64" else whole.astype(spec.dtype)
            if spec.dtype not in ("uint64", "bool") and (array != whole).any():
                raise ValueError(f"a number is none of {spec.dtype}")
        else:
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked for where it matters
                array = np.array(found, np.float32).astype(spec.dtype)
        return array.reshape(-1, *shape)
    except (ValueError, OverflowError, TypeError, zlib.error) as error:
        raise DatasetError(f"{where}: {shown(name)} is not of {spec} ({str(error)[:200]}); {AGAIN}") from error


def _unpacked(data: bytes, size: int, encoding: str) -> bytes:
    found = zlib.decompressobj().decompress(data, size + 1) if encoding == "zlib" else data
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes in place of {size}")
    return found


def _candidates(folder: Path) -> list[Path]:
    """Folders of a dataset: this one, or up to two levels below (NAME/VERSION)."""
    for pattern in ("", "*", "*/*"):
        paths = [folder] if not pattern else sorted(folder.glob(pattern))
        found = [path for path in paths if (path / INFO).is_file() and (path / FEATURES).is_file()]
        if found:
            return found
    return []


def _version_folder(folder: Path) -> Path:
    found = _candidates(folder)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:10])
        raise DatasetError(f"{folder} holds {len(found)} datasets: name one of them: {names}")
    raise DatasetError(f"{folder} is no RLDS dataset: it needs {INFO} and {FEATURES}, here or in FOLDER/NAME/VERSION")


def _read_info(path: Path) -> _Info:
    raw = metadata.read_json(path)
    try:
        found = _Info.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DatasetError(f"{path}: {where[:100]}: {first['msg'][:200]} (got {shown(first['input'])})") from None
    if found.fileFormat != "tfrecord":
        raise DatasetError(
            f"{path}: its files are {shown(found.fileFormat)}, and tfrecord is read: convert it with TFDS "
            "(python -m tensorflow_datasets.scripts.convert_format --out_file_format=tfrecord)"
        )
    names = [split.name for split in found.splits]
    if len(set(names)) != len(names) or not all(re.fullmatch(r"[\w.+-]{1,100}", name) for name in (found.name, *names)):
        raise DatasetError(f"{path}: the name {shown(found.name)} or a split {shown(names)} is none of TFDS's")
    return found


def _read_features(path: Path) -> dict[str, Spec]:
    """The leaves of the tree of features by their paths."""
    raw = metadata.read_json(path)
    if "pythonClassName" not in raw and "type" in raw:
        raise DatasetError(f"{path} is as TFDS before 4.4 wrote it: build the dataset again with a newer one")
    try:
        return dict(_leaves(raw, "", 0))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DatasetError(f"{path} is no tree of TFDS's features ({shown(str(error), 200)}); {AGAIN}") from error


def _leaves(node: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Spec]]:
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if "featuresDict" in node:
        for name, child in sorted(node["featuresDict"]["features"].items()):
            if not re.fullmatch(r"[^/\x00-\x1f\x7f]{1,200}", name):
                raise ValueError(f"{name!r} is no name of a feature")
            yield from _leaves(child, f"{path}{name}/", depth + 1)
    elif "sequence" in node and path == STEPS:
        yield from _leaves(node["sequence"]["feature"], path, depth + 1)
    else:
        yield path.removesuffix("/"), _spec(node)


def _spec(node: Mapping[str, Any]) -> Spec:
    if "text" in node:
        return Spec("text")
    if "image" in node:
        shape = _shape(node["image"]) or (None, None, 3)  # TFDS's default
        dtype = str(node["image"].get("dtype") or "uint8")
        rgb = dtype == "uint8" and len(shape) == 3 and shape[2] in (3, None)
        return Spec("picture" if rgb else "picture that is not RGB of 8 bits,", dtype, shape)
    if "tensor" in node:
        dtype, shape = str(node["tensor"]["dtype"]), _shape(node["tensor"])
        encoding = str(node["tensor"].get("encoding") or "none").lower()
        if dtype == "string":
            return Spec("text") if not shape else Spec("texts,", dtype, shape)
        if not re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)", dtype):
            return Spec("numbers of another type,", dtype, shape)
        if None in shape:
            return Spec("numbers whose count varies,", dtype, shape)
        if 0 in shape:
            return Spec("numbers of which there are none,", dtype, shape)
        if encoding not in ("none", "bytes", "zlib"):
            return Spec(f"numbers in the encoding {shown(encoding)},", dtype, shape)
        return Spec("numbers", dtype, shape, encoding)
    return Spec(f"a {shown(str(node['pythonClassName']).rpartition('.')[2])}")


def _shape(node: Mapping[str, Any]) -> tuple[int | None, ...]:
    sizes = [int(size) for size in node.get("shape", {}).get("dimensions", [])]
    if len(sizes) > 8 or any(not -1 <= size <= LARGEST_SIZE for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return tuple(None if size == -1 else size for size in sizes)
