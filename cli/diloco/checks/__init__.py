"""What would fail with a job, said before anything is started: for ``diloco validate``, ``run`` and ``doctor``.

``machine`` looks at what the job needs of this machine, ``model`` asks the worker about model, tokenizer and device,
``memory`` compares what is needed with what is free, ``verdict`` is ``diloco validate``, ``start`` what ``diloco run``
does before the syncer.
"""
