"""Drives the core and carries out its actions: merges, durable writes, received pushes, downloads.

Each part gets what it uses (the core, the model, the durability, ``emit``), never the whole syncer; syncer.py connects
them. It may import ``store``, ``numerics``, ``messages`` and ``core``. Never here: who may call, and what a page shows.
"""
