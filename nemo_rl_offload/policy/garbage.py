"""What Python's garbage collector has to look at in a process that trains."""

import gc


def freeze_gc() -> None:
    """Let the garbage collector never look again at what is there now: modules, compiled code, optimizer state. Each
    full collection would stop this process for 0.2 to 0.4 s, and the ranks that wait for it."""
    gc.collect()
    gc.freeze()
