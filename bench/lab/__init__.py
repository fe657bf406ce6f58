"""What runs the product outside of a job: in virtual time, and beside other systems.

``world``      a whole job in virtual time: the real syncer core, adoption rule, merge and codec
``goodput``    what share of its time a fleet that fails trains: the paper's table, and the real core beside it
``baselines``  other systems' training of the same job, as processes
``compare``    this system and the baselines under the same faults
``cells``      results that take long, kept by a digest of what made them

It may import every package of the product, and none of them imports it (pyproject.toml, tool.importlinter).
"""
