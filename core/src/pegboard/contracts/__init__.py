"""Contracts: what each kind of part must do. One file each, with invariants. Imports wire types only.

Every module has an integer ``API``: a provider states which one it implements, and another one is refused.
"""
