"""A message queue from one writer to N readers, over shared memory or TCP; usable alone."""

from .contract import Closed, DeadReader, DeadWriter, HandleRefused, MessageError, NoSharedMemory
from .handle import PROTOCOL, Handle
from .message_queue import MessageQueue, attach

__all__ = [
    "PROTOCOL",
    "Closed",
    "DeadReader",
    "DeadWriter",
    "Handle",
    "HandleRefused",
    "MessageError",
    "MessageQueue",
    "NoSharedMemory",
    "attach",
]
