"""Opens the store that ``--store`` names."""

from __future__ import annotations

import errno

from diloco_protocol.common.files import NotWritable
from diloco_syncer.store.base import Store
from diloco_syncer.store.bucket import SCHEMES, BucketStore
from diloco_syncer.store.directory import DirectoryStore


def open_store(where: str, public: bool = False) -> Store:
    """The store in a directory (a path or ``file://``) or a bucket such as ``s3://bucket/folder``. ``public``: of a
    directory's files the umask decides who may read them.

    Raises ``OSError`` with the cure.
    """
    scheme, separator, path = where.partition("://")
    if scheme == "file" or not separator:
        return DirectoryStore(path if separator else where, public)
    if scheme in SCHEMES:
        return BucketStore(where)
    schemes = ", ".join(f"{known}://" for known in ("file", *SCHEMES))
    raise NotWritable(errno.EINVAL, f"store {scheme}://…: a store is a directory, or a URI that begins with {schemes}")
