"""How the built-in trainer divides a model among the ranks of a learner (``training.parallel``)."""
