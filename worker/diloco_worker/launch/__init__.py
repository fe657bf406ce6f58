"""``python -m diloco_worker.launch``: the ranks of a learner in one pod or on one machine (``__main__.py``)."""
