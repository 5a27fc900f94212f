"""Ray starts a new cluster where a call finds that there is none: not while our threads end what they had in the old one."""

from __future__ import annotations

import threading

from ray._private import auto_init_hook

_lock = threading.Lock()
_holders = 0
_before = True


def hold() -> None:
    """Until ``release``, whoever calls Ray without a cluster gets an error instead of a new cluster."""
    global _holders, _before
    with _lock:
        if _holders == 0:
            _before = getattr(auto_init_hook, "enable_auto_connect", True)
            auto_init_hook.enable_auto_connect = False
        _holders += 1


def release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            auto_init_hook.enable_auto_connect = _before
