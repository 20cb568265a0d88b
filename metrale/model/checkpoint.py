"""A checkpoint's safetensors files as one set of named tensors, each read at most once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from metrale.errors import ConfigError
from metrale.model.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """What a file's header says of one tensor; `stored_name` is its name there."""

    stored_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a checkpoint directory, a context manager that keeps the files mapped.

    Args:
        directory: holds model.safetensors, or model.safetensors.index.json and its shards.
        rename: from the stored name of a tensor to the one it is known by; None drops the tensor.

    `tensors` maps known names to headers. ConfigError for a file that is absent or broken, for an index that
    disagrees with its shards, and for two tensors that come to one name.
    """

    def __init__(self, directory: Path, rename: Callable[[str], str | None]) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._rename = rename
        self._taken: set[str] = set()
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        index = _read_index(directory)
        listed = set(index.values()) if index is not None else {SINGLE_FILE}
        try:
            for name in sorted(listed):
                self._add_file(directory / name, index)
            self._check_index(index or {})
        except BaseException:
            self._stack.close()
            raise

    def _check_index(self, index: dict[str, str]) -> None:
        held = {tensor.stored_name for tensor in self.tensors.values()}
        absent = [name for name in index if name not in held and self._rename(name) is not None]
        if absent:
            raise ConfigError(f"{INDEX_FILE} lists tensors that no shard holds: {name_some(absent)}")

    def _add_file(self, path: Path, index: dict[str, str] | None) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors ({error})") from error
        self._files[path] = file
        stored_names: list[str] = file.keys()
        for stored in stored_names:
            if index is not None and stored not in index:
                raise ConfigError(f"{path.name} holds tensor {stored}, which {INDEX_FILE} does not list")
            name = self._rename(stored)
            if name is None:
                continue
            other = self.tensors.get(name)
            if other is not None:
                raise ConfigError(
                    f"tensor {name} stands twice in the checkpoint: {other.stored_name} in {other.file.name} "
                    f"and {stored} in {path.name}"
                )
            header = file.get_slice(stored)
            self.tensors[name] = StoredTensor(stored, path, tuple(header.get_shape()), header.get_dtype())

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """ConfigError unless the checkpoint holds exactly the tensors `expected`, each in its shape."""
        missing = [name for name in expected if name not in self.tensors]
        unexpected = [t.stored_name for name, t in self.tensors.items() if name not in expected]
        if missing or unexpected:
            parts = [f"missing {name_some(missing)}"] if missing else []
            parts += [f"unexpected {name_some(unexpected)}"] if unexpected else []
            problem = "; ".join(parts)
            raise ConfigError(f"the checkpoint in {self.directory} does not fit its config.json: {problem}")
        for name, shape in expected.items():
            stored = self.tensors[name]
            if stored.shape != shape:
                raise ConfigError(
                    f"tensor {stored.stored_name} has the wrong shape: "
                    f"expected {list(shape)}, got {list(stored.shape)}"
                )
            if stored.dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise ConfigError(
                    f"tensor {stored.stored_name} is stored as {stored.dtype}; metrale loads {known}"
                )

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].dtype]

    def take(self, name: str) -> Tensor:
        """The tensor `name` as stored, a view of the mapped file: copy it before the checkpoint is closed.

        Each tensor is taken once; a second time is a ValueError.
        """
        if name in self._taken:
            raise ValueError(f"tensor {name} was taken before")
        self._taken.add(name)
        stored = self.tensors[name]
        tensor: Tensor = self._files[stored.file].get_tensor(stored.stored_name)
        return tensor

    @property
    def untaken(self) -> list[str]:
        """Names of the tensors that nobody has taken."""
        return [name for name in self.tensors if name not in self._taken]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()


def name_some(names: Sequence[str], limit: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name to shard file; None where the checkpoint is one file."""
    if (directory / SINGLE_FILE).is_file():
        return None
    path = directory / INDEX_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path} has no weight_map")
    for name, file in weight_map.items():
        # A shard is a plain file beside its index, whatever a downloaded index says.
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{path} places tensor {name} in {file!r}, which is not a file name")
    return weight_map
