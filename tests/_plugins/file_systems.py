"""Real file systems for tests: small, full, failing. Only root may mount; for others tests are skipped, aloud."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest


def _call(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(folder, *arguments):
    """Something mounted on a new folder."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    folder.mkdir()
    _call("mount", *arguments, folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def tmpfs(folder, size):
    """A file system in memory, of `size` bytes."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


@contextlib.contextmanager
def ext4_on_image(image, folder, size):
    """A file system on a device that is a file: what becomes of the file becomes of the device."""
    with image.open("wb") as file:
        file.truncate(size)
    _call("mkfs.ext4", "-q", "-m", "0", image)
    with mounted(folder, "-o", "loop", image):
        yield folder


def drop_caches(folder):
    """What was written is on the device, and what will be read comes from there."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
