"""Triton kernels. Whether they are compiled or interpreted (``TRITON_INTERPRET=1``) is settled when triton is first imported."""
