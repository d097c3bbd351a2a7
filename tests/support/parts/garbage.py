"""Checks that memory is freed without the garbage collector, which a hub runs rarely."""

import contextlib
import gc


@contextlib.contextmanager
def no_garbage():
    """Fail if what happens meanwhile leaves objects that only the garbage collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()
