"""The syncer and its learners in virtual time: the product's own code, and what lies between them simulated.

Not a test: what tests/unit/syncer/core/test_simulation.py, tests/unit/syncer/test_shell_simulation.py,
tests/unit/worker/test_worker_simulation.py and tests/worlds.py run.

``learners.py`` is a learner with the real adoption rule. ``core_world.py`` has the syncer's real core under everything
that a network and processes do; persisting and merging are single events there, and ``shard_world.py`` has shards that
crash alone. ``shell_world.py`` has the real shell
(driver, durability, merger, checkpoints) between that core and a store: ``memory_store.py`` is the store,
``processes.py`` the event loops and threads of several syncers at once. ``worker_world.py`` has real learners before
that shell: ``worker_process.py`` is the library in a process, ``calls.py`` and ``threads.py`` are its gRPC and its
threads. ``settings.py`` and ``worker_settings.py`` have the kinds of worlds.
"""
