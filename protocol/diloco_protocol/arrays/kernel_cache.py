"""Compiled kernels that lie in an image: read from a folder that nobody can write.

numba looks for its cache only in folders that it can write, so in a container with a
read-only root file system it would compile every kernel anew at each start, some three
seconds of it. An image that compiled the kernels when it was built sets

    NUMBA_CACHE_DIR=<the folder>
    NUMBA_CACHE_LOCATOR_CLASSES=diloco_protocol.arrays.kernel_cache.BuiltCacheLocator,UserWideCacheLocator
    NUMBA_CPU_NAME, NUMBA_CPU_FEATURES       as they were then

and numba asks the class below first. Functions that were not compiled into the image, such
as those of a user's own program, go to the next locator of the list.
"""

from __future__ import annotations

import os

from numba.core.caching import UserProvidedCacheLocator


class BuiltCacheLocator(UserProvidedCacheLocator):
    """NUMBA_CACHE_DIR, also where it is only readable."""

    def ensure_cache_path(self) -> None:
        """Return if the function's folder is there to be read or can be made.

        Raises OSError otherwise. A function of that folder that is not in the cache (its source
        was changed) fails when it is saved; kernels.py then compiles it without a cache.
        """
        path = self.get_cache_path()  # type: ignore[no-untyped-call]
        if os.path.isdir(path) and not os.access(path, os.W_OK):
            return
        super().ensure_cache_path()  # type: ignore[no-untyped-call]
