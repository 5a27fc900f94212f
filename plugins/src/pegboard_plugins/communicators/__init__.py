"""Collectives among the ranks of a group: over torch.distributed, and over shared memory for processes of one host."""
