"""Updates of the draft head that come with weights of the verifier.

An updated head is written to a folder, which drafters poll.

A folder is used because the drafter is a process of its own and may be replaced at any time. A file names the folder
that is served; drafters poll this file.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.head_swaps.head_swaps import HeadSwaps
from wingbeat.runtime.heads.files import read_tensors
from wingbeat.runtime.rollouts.served_weights import FLOATS, WeightsRefused, shown
from wingbeat.runtime.tensor_files import SAFETENSORS, read_json

logger = logging.getLogger(__name__)
SERVED = "served.json"
KEPT = 2
"""Number of written folders that are kept, because a drafter may be reading the previous folder."""
CONFIG = "config.json"
_DIGITS = 7
"""Number of hex digits of a folder's name that are used as the head's version; the version fits into 32 bits."""
LOOK_S = 0.25
"""Seconds between two polls of the file that names the served folder."""


class HeadUpdate:
    """Updates of a draft head, one after another, with the same steps as those of `WeightUpdate`.

    An update is served completely or not at all.

    Args:
        head: folder of the head named in the settings.
        directory: folder on this machine for updated heads.

    Raises:
        WeightsRefused: `head` is not the folder of a head.
    """

    def __init__(self, head: Path, directory: Path) -> None:
        if not (head / CONFIG).is_file():
            raise WeightsRefused(f"{head} is no folder of a draft head that can be updated")
        self._head, self._directory = head, directory
        self._tensors: dict[str, Tensor] = {}

    @property
    def num_written(self) -> int:
        """Number of tensors received in the current update."""
        return len(self._tensors)

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """See `ServedWeights.check`."""
        stored = self._stored.get(name)
        if stored is None:
            raise WeightsRefused(f"{name} is no tensor of the draft head in {self._head}")
        if tuple(stored.shape) != tuple(shape):
            raise WeightsRefused(f"{name} has shape {list(shape)}, expected {list(stored.shape)}")
        if dtype not in FLOATS or stored.dtype not in FLOATS:
            raise WeightsRefused(f"{name} is {shown(dtype)}: only float tensors of a draft head can be updated")

    def write(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """See `WeightUpdate.write`."""
        found: dict[str, Tensor] = {}
        stored = self._stored
        for name, value in read():
            self.check(name, tuple(value.shape), value.dtype)
            if name in found or name in self._tensors:
                raise WeightsRefused(f"{name} is written twice in one update")
            found[name] = value.detach().to("cpu", stored[name].dtype, copy=True)
            if not found[name].isfinite().all():
                raise WeightsRefused(f"{name} holds NaN or infinity")
        if not found:
            raise WeightsRefused("no tensors are given")
        self._tensors |= found

    def finish(self) -> int:
        """Writes the updated head and makes drafters use it; returns the number of tensors received."""
        tensors = {name: tensor.contiguous() for name, tensor in (self._stored | self._tensors).items()}
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
        folder = self._directory / digest.hexdigest()[:16]
        if not folder.exists():
            partial = self._directory / f".{folder.name}-{uuid.uuid4().hex}"
            partial.mkdir(parents=True)
            shutil.copyfile(self._head / CONFIG, partial / CONFIG)
            save_file(tensors, partial / SAFETENSORS, {"format": "pt"})
            # the rename fails if another engine on this machine wrote the same folder first
            with contextlib.suppress(FileExistsError, OSError):
                partial.rename(folder)
            shutil.rmtree(partial, ignore_errors=True)
        with replacing(self._directory / SERVED) as temporary:
            temporary.write_text(json.dumps({"folder": folder.name}))
        self._prune(folder)
        count = len(self._tensors)
        self._tensors = {}
        return count

    def abandon(self) -> None:
        """Discards the received tensors; the served head stays unchanged."""
        self._tensors = {}

    @cached_property
    def _stored(self) -> dict[str, Tensor]:
        """Tensors of the served head."""
        return read_tensors(served_folder(self._directory) or self._head)

    def _prune(self, served: Path) -> None:
        # Names with a leading dot are folders that other engines are writing.
        folders = [one for one in self._directory.glob("[!.]*") if one.is_dir() and one != served]
        for one in sorted(folders, key=lambda one: one.stat().st_mtime_ns, reverse=True)[KEPT - 1 :]:
            shutil.rmtree(one, ignore_errors=True)


def served_folder(directory: Path) -> Path | None:
    """Returns the folder of the head written last; None if no head was written."""
    if not (directory / SERVED).is_file():
        return None
    folder = directory / str(read_json(directory / SERVED).get("folder"))
    return folder if folder.is_dir() else None


def follow(directory: Path, worker: DraftWorker) -> None:
    """Starts a thread that makes a drafter use the served head whenever that head changes.

    The thread ends with its process.
    """
    follower = HeadFollower(directory, worker)
    follower.look()
    threading.Thread(target=follower.run, name="wingbeat-heads", daemon=True).start()


class HeadFollower:
    """Makes one drafter use the served head whenever the head changes."""

    def __init__(self, directory: Path, worker: DraftWorker) -> None:
        self._directory, self._swaps = directory, HeadSwaps.of(worker)
        self._seen: Path | None = None

    def run(self) -> None:
        """Polls for a new head until the process ends."""
        while True:
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Reads the served head and offers it to the drafter, if the head has changed.

        Returns whether the head was offered.
        """
        try:
            folder = served_folder(self._directory)
            if folder is None or folder == self._seen:
                return False
            self._seen = folder
            head = self._swaps.prepare(str(folder))
        # any exception is caught, because the content of a file must not end a healthy drafter
        except Exception as error:
            logger.error("the draft head in %s is not taken: %s: %s", self._directory, type(error).__name__, error)
            return False
        self._swaps.offer(int(folder.name[:_DIGITS], 16), head)
        return True
