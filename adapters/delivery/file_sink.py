"""One safetensors file per request, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from slotmirror.adapters.delivery.file_names import SUFFIX, file_name
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.sink import Sink
from slotmirror.core.errors import ConfigError

_PARTIAL = ".partial-"


class FileSink(Sink):
    """Files in `folder`, which is made if need be, private to the user.

    A file appears under its name when it is complete: it is written beside it and renamed. A later
    request of the same id replaces it. Its metadata has `req_id`, `num_prompt_tokens` and, per
    key, `first_position.KEY`. `prefix` tells apart writers that share the folder.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        _check_library()
        self.folder = folder
        self._prefix = prefix
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("folder", str(folder), f"cannot be made: {error}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError("folder", str(folder), "cannot be written to")

    def write(self, request: RequestRows) -> None:
        """Raises `OSError`, and leaves no file, when the disk does not take it."""
        write_rows(request, self.folder / (self._prefix + file_name(request.req_id)))


def write_rows(request: RequestRows, path: Path) -> None:
    """Write one request to `path`, whole or not at all, readable by the user alone.

    Raises `OSError` when the file system does not take it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    os.close(descriptor)
    try:
        rows = {key: tensor.contiguous() for key, tensor in request.rows.items()}
        save_file(rows, partial, metadata=_metadata(request))
        os.replace(partial, path)
    except BaseException as error:
        Path(partial).unlink(missing_ok=True)
        # The library wraps what the file system said; a sink's callers look for OSError.
        if isinstance(error, SafetensorError):
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


def read_rows(path: Path) -> RequestRows:
    """The request that a file holds."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        metadata: dict[str, str] = opened.metadata()
        rows: dict[str, torch.Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return RequestRows(
        metadata["req_id"],
        int(metadata["num_prompt_tokens"]),
        rows,
        {key: int(metadata[f"first_position.{key}"]) for key in rows},
    )


def request_files(folder: Path) -> Iterator[Path]:
    """The complete files of a folder, oldest first."""
    found = [(entry.stat().st_mtime_ns, entry) for entry in folder.glob(f"*{SUFFIX}")]
    return iter(path for _, path in sorted(found))


def _metadata(request: RequestRows) -> dict[str, str]:
    return {
        "req_id": request.req_id,
        "num_prompt_tokens": str(request.num_prompt_tokens),
        **{f"first_position.{key}": str(at) for key, at in request.first_positions.items()},
    }


def _check_library() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "sink", "files", f"needs the safetensors library (pip install safetensors): {error}"
        ) from error
