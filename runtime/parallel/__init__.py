"""One request on several GPUs: ranks, sequence shards, head exchanges, decode by units, failure of a rank.

Knows no family: what is cut where is said by a family's own files. Modules that a start needs before torch
(`environment`, `split`, `prepared`, `family`, `shared_load`, `start`) import the standard library only.
"""
